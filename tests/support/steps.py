"""A scheduler driven step by step over a runner that recomputes everything, so that nothing but the plan can make it
right.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from radixlm.base.plan import Outcome, Plan
from radixlm.base.request import LogprobParams, Request, TextParams
from radixlm.base.sampling import SamplingParams
from radixlm.cache.manager import RadixManager
from radixlm.cache.ports import Cache
from radixlm.schedule.guide import MakeTicket
from radixlm.schedule.planner import StepLimits
from radixlm.schedule.scheduler import Scheduler, Settings
from radixlm.wire.messages import Failed, Fault, Finish, Stats, Tokens

VOCAB = 1000


def next_token(tokens: list[int] | np.ndarray) -> int:
    """The "model": a token that depends on everything before it."""
    return zlib.crc32(np.asarray(tokens, np.int32).tobytes()) % VOCAB


def continuation(prompt: list[int], count: int, stops: frozenset[int] = frozenset()) -> list[int]:
    """What the model generates for a prompt, whoever schedules it."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        tokens.append(next_token(tokens))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


class RecomputingRunner:
    """Mirrors the device tables from plans and remembers what each slot holds: a span may only read what was written
    for it.

    The KV of a position stands for all tokens up to it, so a slot holds the checksum of these.
    """

    def __init__(self, rows: int, length: int, pages: int, page_size: int) -> None:
        self._tokens = np.zeros((rows, length + 1), np.int32)
        self._sums = np.zeros((rows, length + 1), np.int64)
        self._pages = np.full((rows, length + 1), -1, np.int64)
        self._slots = np.full(pages * page_size, -1, np.int64)
        self._page_size = page_size

    def run(self, plan: Plan, masks: Mapping[int, np.ndarray] | None = None) -> Outcome:
        for join in plan.joins:
            self._pages[join.row] = -1
            self._pages[join.row, : len(join.pages)] = join.pages
            for position, token in enumerate(join.tokens.tolist()):
                self._put(join.row, position, token)
        self._pages[plan.page_rows, plan.page_index] = plan.page_ids
        for row, position, token in zip(
            plan.token_rows.tolist(), plan.token_positions.tolist(), plan.token_ids.tolist(), strict=True
        ):
            self._put(row, position, token)
        sampled = []
        for i, (row, start, length, samples) in enumerate(
            zip(plan.rows.tolist(), plan.starts.tolist(), plan.lengths.tolist(), plan.samples.tolist(), strict=True)
        ):
            positions = np.arange(start + length)
            pages = self._pages[row, positions // self._page_size]
            assert (pages >= 0).all(), f"row {row} has no page for some position below {start + length}"
            slots = pages * self._page_size + positions % self._page_size
            wrong = np.flatnonzero(self._slots[slots[:start]] != self._sums[row, :start])
            assert not len(wrong), f"step {plan.step}: row {row} reads position {wrong[0]}, which is not its own KV"
            self._slots[slots[start:]] = self._sums[row, start : start + length]
            if samples:
                number = self._sums[row, start + length - 1].item()
                sampled.append(number % VOCAB)
                if masks and i in masks:
                    allowed = np.flatnonzero(np.unpackbits(masks[i].view(np.uint8), bitorder="little"))
                    sampled[-1] = int(allowed[number % len(allowed)])
                self._put(row, start + length, sampled[-1])
        return Outcome(plan.step, sampled)

    def _put(self, row: int, position: int, token: int) -> None:
        self._tokens[row, position] = token
        before = self._sums[row, position - 1].item() if position else 0
        self._sums[row, position] = zlib.crc32(token.to_bytes(4, "little"), before)


def settings(**changes: Any) -> Settings:
    values: dict[str, Any] = {
        "context_length": 2048,
        "eos_ids": frozenset({7}),
        "max_running": 32,
        "max_queued": 10**6,
        "step": StepLimits(tokens=128, chunk=64),
    }
    return Settings(**{**values, **changes})


@dataclass
class Driver:
    """One scheduler with its runner, its clock and everything it said."""

    scheduler: Scheduler
    depth: int = 1
    now: float = 0.0
    tick: float = 0.01
    tokens: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, Finish | Fault] = field(default_factory=dict)
    stats: dict[int, Stats] = field(default_factory=dict)
    plans: list[Plan] = field(default_factory=list)
    spans: list[list[tuple[int, int, int]]] = field(default_factory=list)  # per plan: (uid, start, length)

    def __post_init__(self) -> None:
        s = self.scheduler
        self._runner = RecomputingRunner(
            s.settings.max_running, s.settings.context_length, s.cache.pages, s.cache.page_size
        )
        self._flights: deque[tuple[Plan, Outcome]] = deque()
        self._uids: dict[int, int] = {}

    def submit(self, uid: int, prompt: list[int], new: int = 8, **more: Any) -> None:
        sampling = more.pop("sampling", SamplingParams(max_new_tokens=new, temperature=0.0))
        arrival = more.pop("arrival", self.now)
        self.tokens[uid] = []
        self.scheduler.submit(
            Request(uid=uid, rid=str(uid), tokens=tuple(prompt), sampling=sampling, arrival=arrival, **more)
        )
        self._listen()

    def step(self) -> Plan | None:
        """One turn of the loop."""
        self.now += self.tick
        plan = self.scheduler.plan(self.now)
        if plan is not None:
            for join in plan.joins:
                self._uids[join.row] = join.uid
            self.plans.append(plan)
            self.spans.append(
                [
                    (self._uids[row], start, length)
                    for row, start, length in zip(
                        plan.rows.tolist(), plan.starts.tolist(), plan.lengths.tolist(), strict=True
                    )
                ]
            )
            masks = None
            if plan.wants_history:
                while self._flights:
                    self.scheduler.commit(*self._flights.popleft(), self.now)
                masks = self.scheduler.masks(plan, self.now)
            self._flights.append((plan, self._runner.run(plan, masks)))
        if self._flights and (plan is None or len(self._flights) >= self.depth):
            self.scheduler.commit(*self._flights.popleft(), self.now)
        self._listen()
        return plan

    def run(self, most: int = 100_000) -> None:
        """Until nothing is left to do."""
        while not self.scheduler.idle:
            self.step()
            most -= 1
            assert most, "the scheduler does not come to an end"

    def _listen(self) -> None:
        for message in self.scheduler.take_messages():
            if isinstance(message, Tokens):
                uids = np.frombuffer(message.uids, np.int64).tolist()
                for uid, token in zip(uids, np.frombuffer(message.ids, np.int32).tolist(), strict=True):
                    assert uid not in self.ends, f"sequence {uid} got a token after its end"
                    self.tokens[uid].append(token)
                for extra in message.extras:
                    if extra.stats is not None:
                        self.stats[extra.uid] = extra.stats
                    if extra.finish is not None:
                        self._end(extra.uid, extra.finish)
            elif isinstance(message, Failed):
                self._end(message.uid, message.fault)

    def _end(self, uid: int, how: Finish | Fault) -> None:
        assert uid not in self.ends, f"sequence {uid} ended twice"
        self.ends[uid] = how


def make_driver(
    pages: int = 20_000,
    page_size: int = 1,
    depth: int = 1,
    cache: Cache | None = None,
    make_ticket: MakeTicket | None = None,
    **changes: Any,
) -> Driver:
    return Driver(Scheduler(cache or RadixManager(pages, page_size), settings(**changes), make_ticket), depth)


__all__ = [
    "VOCAB", "Driver", "LogprobParams", "SamplingParams", "StepLimits", "TextParams", "continuation", "make_driver",
    "settings",
]  # fmt: skip
