"""The real loop, scheduler and cache on a clock of their own: arrivals come from a list, steps cost what a model of
cost says.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from radixlm.base.facts import DeviceFacts, EngineFacts, ModelFacts, PoolFacts
from radixlm.base.request import Request
from radixlm.base.sampling import SamplingParams
from radixlm.cache.manager import RadixManager
from radixlm.cache.ports import Cache
from radixlm.engine.loop import EngineLoop
from radixlm.runner.clock import CostModel, VirtualClock
from radixlm.runner.null import NullRunner
from radixlm.schedule.planner import StepLimits
from radixlm.schedule.scheduler import Scheduler, Settings
from radixlm.wire.messages import Drain, Failed, Fault, Finish, Stats, Submit, ToApi, ToDetokenizer, ToEngine, Tokens

VOCAB = 32_000


def facts(pages: int, page_size: int = 1, rows: int = 256, context: int = 4096) -> EngineFacts:
    return EngineFacts(
        model=ModelFacts(
            name="null", path="", architecture="null", dtype="none", parameters=0, layers=0, hidden_size=0,
            vocab_size=VOCAB, sampled_vocab_size=VOCAB, eos_ids=(2,), bos_id=1, context_length=context,
            kv_bytes_per_token=0, weight_bytes=0,
        ),
        device=DeviceFacts(kind="null", name="null", memory_total=0, memory_free=0, cores=1),
        pool=PoolFacts(pages=pages, page_size=page_size, max_running=rows, bytes=0),
        decisions={},
        timings={},
    )  # fmt: skip


class Arrivals:
    """An inbox that holds requests until the clock reaches their arrival; an idle engine sleeps to the next one."""

    def __init__(self, requests: Iterator[Request], clock: VirtualClock) -> None:
        self._requests = requests
        self._clock = clock
        self._next: Request | None = next(requests, None)

    def receive(self, timeout: float | None) -> list[ToEngine]:
        if self._next is None:
            return [Drain(1e9)] if timeout is None else []
        if timeout is None:
            self._clock.reach(self._next.arrival)
        due: list[ToEngine] = []
        while self._next is not None and self._next.arrival <= self._clock.now:
            due.append(Submit(self._next))
            self._next = next(self._requests, None)
        return due

    def close(self) -> None:
        pass


@dataclass
class Record:
    """What the engine said: one terminal message per sequence, and the tokens as a running checksum."""

    ends: dict[int, Finish | Fault] = field(default_factory=dict)
    stats: dict[int, Stats] = field(default_factory=dict)
    counts: Counter[int] = field(default_factory=Counter)
    texts: dict[int, int] = field(default_factory=dict)

    def send(self, message: ToDetokenizer | ToApi) -> None:
        if isinstance(message, Tokens):
            uids = np.frombuffer(message.uids, np.int64).tolist()
            for uid, token in zip(uids, np.frombuffer(message.ids, np.int32).tolist(), strict=True):
                assert uid not in self.ends, f"sequence {uid} got a token after its end"
                self.counts[uid] += 1
                self.texts[uid] = hash((self.texts.get(uid, 0), token))
            for extra in message.extras:
                if extra.finish is not None:
                    assert extra.stats is not None
                    self.stats[extra.uid] = extra.stats
                    self._end(extra.uid, extra.finish)
        elif isinstance(message, Failed):
            self._end(message.uid, message.fault)

    def _end(self, uid: int, how: Finish | Fault) -> None:
        assert uid not in self.ends, f"sequence {uid} ended twice"
        self.ends[uid] = how

    def close(self) -> None:
        pass


def chats(count: int, seconds: float, seed: int) -> Iterator[Request]:
    """A day of users: system prompts that many share, conversations that come back longer, some strangers; rush
    hours.
    """
    rng = random.Random(seed)
    systems = [[rng.randrange(3, VOCAB) for _ in range(rng.randrange(50, 200))] for _ in range(12)]
    talks: list[list[int]] = []
    now = 0.0
    for uid in range(count):
        rush = 3.0 if (now // (seconds / 24)) % 3 == 0 else 0.6
        now += rng.expovariate(count / seconds * rush)
        kind = rng.random()
        if kind < 0.4 and talks:
            tokens = talks.pop(rng.randrange(len(talks))) + [
                rng.randrange(3, VOCAB) for _ in range(rng.randrange(5, 60))
            ]
        elif kind < 0.9:
            tokens = rng.choice(systems) + [rng.randrange(3, VOCAB) for _ in range(rng.randrange(5, 60))]
        else:
            tokens = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(5, 300))]
        if len(tokens) < 600 and len(talks) < 200:
            talks.append(tokens)
        sampling = SamplingParams(max_new_tokens=rng.choice((4, 8, 16, 48)), temperature=0.0)
        yield Request(uid=uid, rid=str(uid), tokens=tuple(tokens), sampling=sampling, arrival=now)


@dataclass
class Simulation:
    """One run. `cost` is such that a step of 50 rows takes some 30 ms."""

    pages: int = 60_000
    page_size: int = 1
    rows: int = 256
    depth: int = 2
    policy: str = "fcfs"
    cache: Cache | None = None
    verify_every: int = 50
    cost: CostModel = field(default_factory=lambda: CostModel(base=0.02, per_token=0.0002))

    def run(self, requests: Iterator[Request]) -> tuple[Record, Scheduler]:
        clock, record = VirtualClock(), Record()
        engine = facts(self.pages, self.page_size, self.rows)
        settings = Settings(
            context_length=4096,
            eos_ids=frozenset((2,)),
            max_running=self.rows,
            max_queued=10**6,
            step=StepLimits(tokens=1024, chunk=512),
            policy=self.policy,
        )
        scheduler = Scheduler(self.cache or RadixManager(self.pages, self.page_size), settings)
        runner = NullRunner(engine, end_probability=0.02, cost=self.cost, clock=clock, verify_every=self.verify_every)
        EngineLoop(scheduler, runner, Arrivals(requests, clock), record, record, self.depth, clock=clock).run()
        return record, scheduler
