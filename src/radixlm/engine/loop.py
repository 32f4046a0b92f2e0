"""This module owns the loop: messages in, plan, forward, sample, settle, commit, messages out. There is one, whatever
the depth.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from radixlm.base.errors import BadRequest, RadixError
from radixlm.base.plan import Outcome, Plan
from radixlm.engine.status import StatusLog
from radixlm.engine.watchdog import Watchdog
from radixlm.schedule.scheduler import Scheduler
from radixlm.wire.link import Inbox, Outbox
from radixlm.wire.messages import (
    Cancel,
    Drain,
    EndSession,
    Fault,
    Goodbye,
    Query,
    Reply,
    Stop,
    Submit,
    ToApi,
    ToDetokenizer,
    ToEngine,
)

log = logging.getLogger("radixlm.engine")

#: Seconds between two looks at sequences that wait for something else than a step (their grammar is being compiled).
NAP = 0.002


class Pending(Protocol):
    """A step that was queued on the device."""

    def wait(self) -> Outcome:
        """Block until the step is done. Called once, in the order of the plans."""
        ...


class Runner(Protocol):
    """Executes plans in the order they are given."""

    def forward(self, plan: Plan) -> Pending:
        """Queue the forward pass; does not wait for the device."""
        ...

    def sample(self, pending: Any, masks: Any = None) -> None:
        """Queue the choice of the next tokens, under an optional mask of allowed tokens."""
        ...


class _Broken:
    """A step that could not be queued: its outcome is the error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self) -> Outcome:
        raise self._error


class EngineLoop:
    """Drives one scheduler and one runner until it is told to stop.

    Args:
        depth: steps in flight at most. 1: a step is planned when the last is known. 2: while the device computes one
            step the host plans the next and hands out the one before.
        clock: `time.time`, or a simulated one.
        more: further figures for `snapshot`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        inbox: Inbox[ToEngine],
        to_text: Outbox[ToDetokenizer],
        to_api: Outbox[ToApi],
        depth: int,
        watchdog: Watchdog | None = None,
        status: StatusLog | None = None,
        clock: Callable[[], float] = time.time,
        more: Callable[[], dict[str, float]] = dict,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._inbox = inbox
        self._to_text = to_text
        self._to_api = to_api
        self._depth = depth
        self._watchdog = watchdog
        self._status = status
        self._clock = clock
        self._more = more
        self._in_flight: deque[tuple[Plan, Pending]] = deque()
        self._busy_seconds = 0.0
        self._drain_until: float | None = None
        self._stalled = False  # sequences wait, but there was nothing to compute

    def run(self) -> None:
        """Work until drained. Blocks without polling while there is nothing to do."""
        try:
            while not (self._scheduler.idle and self._drain_until is not None):
                idle = self._scheduler.idle
                if idle and self._watchdog is not None:
                    self._watchdog.rest()
                for message in self._inbox.receive(None if idle else NAP if self._stalled else 0):
                    self._handle(message)
                self._flush()
                self._stalled = not self._scheduler.idle and not self._turn()
        finally:
            # Whoever runs the loop in a process of their own goes on: nobody may watch for a step that never comes.
            if self._watchdog is not None:
                self._watchdog.close()
        self._to_text.send(Goodbye())

    def _turn(self) -> bool:
        """One turn of the loop: at most one step is queued, and the oldest is settled. False if there was none."""
        started = time.perf_counter()
        if self._watchdog is not None:
            self._watchdog.beat()
        if self._drain_until is not None and self._clock() >= self._drain_until:
            self._scheduler.cancel_all("the server is shutting down", self._clock())
        plan = self._scheduler.plan(self._clock())
        if plan is not None:
            self._in_flight.append((plan, self._launch(plan)))
        worked = bool(self._in_flight)
        if self._in_flight and (plan is None or len(self._in_flight) >= self._depth):
            self._settle(*self._in_flight.popleft())
        self._flush()
        self._busy_seconds += time.perf_counter() - started
        if self._status is not None:
            self._status.step(self._clock())
        return worked

    def _launch(self, plan: Plan) -> Pending:
        try:
            pending = self._runner.forward(plan)
        except Exception as error:
            return _Broken(error)
        masks = None
        if plan.wants_history:
            while self._in_flight:
                self._settle(*self._in_flight.popleft())
            masks = self._scheduler.masks(plan, self._clock())
        try:
            self._runner.sample(pending, masks)
            return pending
        except Exception as error:
            return _Broken(error)

    def _settle(self, plan: Plan, pending: Pending) -> None:
        """Hand a step's outcome to the scheduler. A step that raised ends the sequences that run, and nothing else."""
        try:
            outcome = pending.wait()
        except Exception as error:
            log.exception("step %d failed; the sequences that were running end with an error", plan.step)
            reason = f"the step that computed this request failed: {type(error).__name__}: {error}"
            outcome = Outcome(
                plan.step, [0] * int(plan.samples.sum()), failed=dict.fromkeys(range(len(plan.rows)), reason)
            )
            self._scheduler.commit(plan, outcome, self._clock())
            # Rows that were not part of it may have missed page-table writes.
            self._scheduler.fail_running(reason, self._clock())
            return
        self._scheduler.commit(plan, outcome, self._clock())

    def _flush(self) -> None:
        for message in self._scheduler.take_messages():
            self._to_text.send(message)

    def _handle(self, message: ToEngine) -> None:
        now = self._clock()
        if isinstance(message, Submit):
            self._scheduler.submit(message.request)
        elif isinstance(message, Stop):
            self._scheduler.stop(message.uid, now)
        elif isinstance(message, Cancel):
            for uid in message.uids:
                self._scheduler.cancel(uid, message.reason, now)
        elif isinstance(message, EndSession):
            self._scheduler.end_session(message.session)
        elif isinstance(message, Drain):
            self._drain_until = now + message.seconds
        else:
            self._to_api.send(self._answer(message))

    # ---- questions from outside

    def _answer(self, query: Query) -> Reply:
        try:
            return Reply(query.ticket, self._ask(query.what))
        except RadixError as error:
            return Reply(query.ticket, {}, Fault(error.status, error.code, error.message))

    def _ask(self, what: str) -> dict[str, Any]:
        if what == "ping":
            return {}
        if what == "stats":
            return self.snapshot()
        if what == "flush":
            return self._flush_cache()
        if what == "audit":
            self._scheduler.cache.audit()
            return dict(self._scheduler.cache.counts())
        raise BadRequest(f"unknown question {what!r}; known: ping, stats, flush, audit")

    def _flush_cache(self) -> dict[str, Any]:
        cache, scheduler = self._scheduler.cache, self._scheduler
        while self._in_flight:
            self._settle(*self._in_flight.popleft())  # what has ended but for a step in flight holds pages
        if scheduler.running or scheduler.waiting:
            busy = len(scheduler.running) + len(scheduler.waiting)
            raise BadRequest(f"{busy} requests are running or waiting; flush when the server is idle", code="busy")
        return {"flushed_tokens": cache.reclaim(cache.pages * cache.page_size)}

    def snapshot(self) -> dict[str, Any]:
        """Gauges and running totals, by the names that `observe.metrics` knows."""
        scheduler, totals = self._scheduler, self._scheduler.counters
        counts = scheduler.cache.counts()
        return {
            "running": sum(1 for s in scheduler.running if s.finish is None),
            "waiting": len(scheduler.waiting),
            "prompt_tokens": totals.prompt_tokens,
            "cached_tokens": totals.cached_tokens,
            "queried_tokens": totals.prompt_tokens,
            "generation_tokens": totals.generation_tokens,
            "retractions": totals.retractions,
            "aborted": totals.aborted,
            "finished_stop": totals.finished_stop,
            "finished_length": totals.finished_length,
            "finished_abort": totals.finished_abort,
            "evicted_tokens": scheduler.cache.evicted_tokens,
            "pool_total": counts["total"],
            "pool_free": counts["free"],
            "pool_leased": counts["leased"],
            "pool_pinned": counts["pinned"],
            "pool_evictable": counts["evictable"],
            "new_token_ratio": scheduler.ratio,
            "steps": totals.steps,
            "jump_forward_tokens": totals.jump_forward_tokens,
            **self._more(),
            "busy_seconds": self._busy_seconds,
        }
