"""This module owns the load: when requests arrive, how many run at once, and what was measured of each.

Arrivals are open-loop: they do not wait for answers. A server that stalls keeps its arrivals coming, and a request's
latency counts from the moment it was due, so a stall is seen by everyone who would have waited (what Gil Tene calls
coordinated omission is avoided). The times from the moment of sending are kept beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from radixlm.base.errors import BadRequest, RadixError
from radixlm.bench.datasets import Session, Turn

Clock = Callable[[], float]


@dataclass(slots=True)
class Record:
    """What was measured of one request. Times are seconds after the start of the run.

    Attributes:
        due: when it should have been sent: its arrival, the end of the turn before it, or, under a bound on
            concurrency without a rate, when its slot was free.
        stamps: when each piece of the answer came.
        end: the answer was complete, or the error came.
        wanted: output tokens asked for.
    """

    session: int
    turn: int
    due: float
    sent: float
    wanted: int
    end: float = 0.0
    stamps: array[float] = field(default_factory=lambda: array("d"))
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None

    @property
    def first(self) -> float:
        """When the first token came (for an answer without visible text, when it ended)."""
        return self.stamps[0] if self.stamps else self.end

    @property
    def last(self) -> float:
        return self.stamps[-1] if self.stamps else self.end


@dataclass(frozen=True, slots=True)
class Said:
    """A finished turn: what the user said and what came back."""

    turn: Turn
    answer: str


class Target(Protocol):
    """What is put under load."""

    async def send(self, said: Sequence[Said], turn: Turn, record: Record, clock: Clock) -> str:
        """Send one request, fill in its record (`stamps`, `end`, the token counts), return the answer's text.

        Raises:
            RadixError: the request failed.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How requests arrive.

    Attributes:
        rate: sessions a second; infinite: all at once.
        burstiness: shape of the gamma-distributed gaps: 1 is a Poisson process, less is burstier, infinite is a fixed
            rate.
        max_concurrency: sessions in flight at once; None for no bound.
    """

    rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise BadRequest(f"request-rate is {self.rate}; it must be above 0, or inf", param="request_rate")
        if not self.burstiness > 0:
            raise BadRequest(f"burstiness is {self.burstiness}; it must be above 0, or inf", param="burstiness")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise BadRequest(
                f"max-concurrency is {self.max_concurrency}; it must be 1 or more", param="max_concurrency"
            )

    def arrivals(self, count: int) -> list[float]:
        """When each of `count` sessions is due, in seconds. A function of the seed; the first is due at 0."""
        if math.isinf(self.rate):
            return [0.0] * count
        rng = random.Random(f"{self.seed}/arrivals")
        mean = 1.0 / self.rate
        due, at = [], 0.0
        for _ in range(count):
            due.append(at)
            at += mean if math.isinf(self.burstiness) else rng.gammavariate(self.burstiness, mean / self.burstiness)
        return due

    @property
    def closed(self) -> bool:
        """Requests arrive when others end: there is a bound on concurrency but no rate."""
        return math.isinf(self.rate) and self.max_concurrency is not None


@dataclass(frozen=True, slots=True)
class Run:
    """What came of a load: every request's record, and the seconds from the first arrival to the last end."""

    records: list[Record]
    seconds: float


async def run(
    target: Target, sessions: Sequence[Session], load: Load, on_done: Callable[[Record], None] = lambda record: None
) -> Run:
    """Send every session to the target as the load says; return when all have ended.

    Requests that fail are part of the result; the later turns of their session are not sent and count as failed too.
    """
    runner = _Runner(target, load, on_done)
    due = load.arrivals(len(sessions))
    async with asyncio.TaskGroup() as tasks:
        for index, session in enumerate(sessions):
            wait = due[index] - runner.clock()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.create_task(runner.session(index, session, due[index]))
    return Run(runner.records, max((record.end for record in runner.records), default=0.0))


class _Runner:
    def __init__(self, target: Target, load: Load, on_done: Callable[[Record], None]) -> None:
        self.records: list[Record] = []
        self._target = target
        self._closed = load.closed
        self._on_done = on_done
        self._slots = asyncio.Semaphore(load.max_concurrency) if load.max_concurrency else contextlib.nullcontext()
        self._started = time.perf_counter()

    def clock(self) -> float:
        return time.perf_counter() - self._started

    async def session(self, index: int, session: Session, due: float) -> None:
        async with self._slots:
            if self._closed:
                due = self.clock()
            said: list[Said] = []
            for number, turn in enumerate(session.turns):
                record = Record(index, number, due, self.clock(), turn.max_tokens)
                self.records.append(record)
                if len(said) == number:
                    answer = await self._request(said, turn, record)
                    if answer is not None:
                        said.append(Said(turn, answer))
                else:
                    record.error = "not sent: an earlier turn of the session failed"
                    record.end = record.sent
                due = record.end
                self._on_done(record)

    async def _request(self, said: Sequence[Said], turn: Turn, record: Record) -> str | None:
        try:
            return await self._target.send(said, turn, record, self.clock)
        except RadixError as error:
            record.error = error.message
            record.end = self.clock()
            return None
