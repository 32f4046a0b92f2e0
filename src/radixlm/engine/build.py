"""This module owns the wiring of an engine: cache, scheduler and loop from a configuration and the facts of a booted
runner.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from radixlm.base.facts import EngineFacts
from radixlm.cache.manager import RadixManager
from radixlm.cache.nocache import NoCache
from radixlm.cache.ports import Cache
from radixlm.checkpoint.locate import locate
from radixlm.config.schema import CacheConfig, Config
from radixlm.engine.loop import EngineLoop, Runner
from radixlm.engine.status import StatusLog
from radixlm.engine.watchdog import Watchdog
from radixlm.grammar.base import GrammarError, Vocabulary
from radixlm.grammar.compiler import Compiler, Limits
from radixlm.schedule.planner import StepLimits
from radixlm.schedule.scheduler import Scheduler, Settings
from radixlm.wire.link import Inbox, Outbox
from radixlm.wire.messages import ToApi, ToDetokenizer, ToEngine


def make_cache(config: CacheConfig, pages: int, page_size: int) -> Cache:
    if config.disable_radix_cache:
        return NoCache(pages, page_size)
    return RadixManager(pages, page_size, policy=config.radix_eviction_policy)


#: Forced tokens that are worth a longer span. On a GPU a step with such a span runs without its captured graph.
JUMP_FORWARD = {"cpu": 1, "null": 1, "cuda": 4}


def make_compiler(config: Config, facts: EngineFacts) -> Compiler:
    """What makes guides for this model. The model's vocabulary is read when the first one is asked for."""

    def read() -> Vocabulary:
        model = config.model
        checkpoint = locate(model.model, model.revision, model.tokenizer_path, lambda stage, fraction: None)
        if checkpoint.tokenizer_file is None:
            raise GrammarError("this model has no tokenizer, so that no grammar can be enforced")
        text = checkpoint.tokenizer_file.read_text(encoding="utf-8")
        return Vocabulary(text, facts.model.sampled_vocab_size, facts.model.eos_ids)

    limits = Limits(seconds=config.limits.grammar_timeout, bytes=config.limits.max_grammar_bytes)
    return Compiler(cache(read), config.device.grammar_backend, limits)


def make_scheduler(config: Config, facts: EngineFacts, compiler: Compiler | None = None) -> Scheduler:
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
        jump_forward=0 if config.device.disable_jump_forward else JUMP_FORWARD.get(facts.device.kind, 4),
        fair=config.server.api_key_file is not None,
        seed=config.model.random_seed or 0,
    )
    pages = make_cache(config.cache, facts.pool.pages, facts.pool.page_size)
    return Scheduler(pages, settings, compiler.ticket if compiler is not None else None)


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
    compiler = make_compiler(config, facts)
    if facts.device.kind != "null":
        compiler.warm()
    scheduler = make_scheduler(config, facts, compiler)
    return EngineLoop(
        scheduler,
        runner,
        inbox,
        to_text,
        to_api,
        depth or overlap_depth(config, facts)[0],
        Watchdog(seconds) if seconds > 0 else None,
        StatusLog(scheduler, config.observe.log_stats_interval),
        more=compiler.figures,
    )
