"""This module owns the wiring of an engine: cache, scheduler and loop from a configuration and the facts of a booted
runner.
"""

from __future__ import annotations

from typing import Any

from radixlm.base.facts import EngineFacts
from radixlm.cache.manager import RadixManager
from radixlm.cache.nocache import NoCache
from radixlm.cache.ports import Cache
from radixlm.config.schema import CacheConfig, Config
from radixlm.engine.loop import EngineLoop, Runner
from radixlm.engine.status import StatusLog
from radixlm.engine.watchdog import Watchdog
from radixlm.schedule.planner import StepLimits
from radixlm.schedule.scheduler import Scheduler, Settings
from radixlm.wire.link import Inbox, Outbox
from radixlm.wire.messages import ToApi, ToDetokenizer, ToEngine


def make_cache(config: CacheConfig, pages: int, page_size: int) -> Cache:
    if config.disable_radix_cache:
        return NoCache(pages, page_size)
    return RadixManager(pages, page_size, policy=config.radix_eviction_policy)


def make_scheduler(config: Config, facts: EngineFacts) -> Scheduler:
    """`config` has its device-dependent values derived (see `config.resolve.derive`)."""
    schedule = config.schedule
    assert schedule.chunked_prefill_size is not None
    assert schedule.max_prefill_tokens is not None
    settings = Settings(
        context_length=facts.model.context_length,
        eos_ids=frozenset(facts.model.eos_ids),
        max_running=facts.pool.max_running,
        max_queued=schedule.max_queued_requests,
        step=StepLimits(tokens=schedule.max_prefill_tokens, chunk=schedule.chunked_prefill_size),
        policy=schedule.schedule_policy,
        lpm_max_wait=schedule.lpm_max_wait,
        conservativeness=schedule.schedule_conservativeness,
        queue_timeout=schedule.queue_timeout,
        request_timeout=schedule.request_timeout,
        preemption=schedule.priority_preemption_threshold if schedule.enable_priority_scheduling else None,
        shared_prefix=facts.shared_prefix,
        seed=config.model.random_seed or 0,
    )
    return Scheduler(make_cache(config.cache, facts.pool.pages, facts.pool.page_size), settings)


def overlap_depth(config: Config, facts: EngineFacts) -> tuple[int, str]:
    """How many steps may be in flight, and why."""
    if config.schedule.disable_overlap_schedule:
        return 1, "--disable-overlap-schedule"
    if facts.device.kind == "cpu":
        return 1, "the host waits while a CPU computes: a second step in flight would only delay the first one's tokens"
    return 2, "the host plans the next step while the device computes one"


def make_loop(
    config: Config,
    facts: EngineFacts,
    runner: Runner | Any,
    inbox: Inbox[ToEngine],
    to_text: Outbox[ToDetokenizer],
    to_api: Outbox[ToApi],
    depth: int | None = None,
) -> EngineLoop:
    """`depth` overrides what `overlap_depth` says."""
    seconds = config.observe.watchdog_timeout
    scheduler = make_scheduler(config, facts)
    return EngineLoop(
        scheduler,
        runner,
        inbox,
        to_text,
        to_api,
        depth or overlap_depth(config, facts)[0],
        Watchdog(seconds) if seconds > 0 else None,
        StatusLog(scheduler, config.observe.log_stats_interval),
    )
