"""This module owns the order of the waiting queue, and the estimate by which a request is admitted."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterable

from radixlm.cache.ports import Cache
from radixlm.schedule.sequence import Sequence

#: Orders that look at the tree consider this many sequences; the rest keep the order of arrival behind them.
LOOKED_AT = 128


def by_arrival(sequence: Sequence) -> tuple[int, float, int]:
    return (-sequence.request.priority, sequence.request.arrival, sequence.uid)


class FirstCome:
    """`fcfs`: the queue is kept in this order anyway."""

    def arrange(self, waiting: list[Sequence], now: float) -> list[Sequence]:
        return waiting


class Ranked:
    """Any other order, with two bounds that no order can break: higher priorities go first, and whoever has waited
    `max_wait` seconds goes ahead of all orders (so that a request that shares nothing is not starved by those that
    do)."""

    def __init__(
        self,
        rank: Callable[[list[Sequence]], list[Sequence]],
        max_wait: float,
    ) -> None:
        self._rank = rank
        self._max_wait = max_wait

    def arrange(self, waiting: list[Sequence], now: float) -> list[Sequence]:
        old = [s for s in waiting if now - s.request.arrival >= self._max_wait]
        fresh = [s for s in waiting if now - s.request.arrival < self._max_wait]
        ranked = self._rank(fresh[:LOOKED_AT]) + fresh[LOOKED_AT:]
        ranked.sort(key=lambda s: -s.request.priority)  # stable: the rank holds within a priority
        return old + ranked


def longest_prefix(cache: Cache) -> Callable[[list[Sequence]], list[Sequence]]:
    """`lpm`: those with the longest cached prefix first, while it is still cached."""

    def rank(waiting: list[Sequence]) -> list[Sequence]:
        return sorted(waiting, key=lambda s: -cache.match(s.token_array(s.prefix_limit), s.request.namespace))

    return rank


def depth_first(cache: Cache) -> Callable[[list[Sequence]], list[Sequence]]:
    """`dfs-weight`: walk the tree depth first, the branch with most waiting sequences first, so that a branch is used
    up before it is evicted (Zheng et al., SGLang, 2024, section 3: depth-first order is optimal for a given batch)."""

    def rank(waiting: list[Sequence]) -> list[Sequence]:
        paths = {s.uid: cache.path(s.token_array(s.prefix_limit), s.request.namespace) for s in waiting}
        weight = Counter(node for path in paths.values() for node in path)
        end = (1, 0)  # after every child: (-weight, node) is smaller
        return sorted(waiting, key=lambda s: [*((-weight[node], node) for node in paths[s.uid]), end])

    return rank


def longest_output(waiting: list[Sequence]) -> list[Sequence]:
    """`lof`: those that may generate most first, so that the last step of a batch is not one long request alone."""
    return sorted(waiting, key=lambda s: -s.remaining)


def shuffled(seed: int) -> Callable[[list[Sequence]], list[Sequence]]:
    """`random`: a baseline to measure the others against."""
    generator = random.Random(seed)

    def rank(waiting: list[Sequence]) -> list[Sequence]:
        return generator.sample(waiting, len(waiting))

    return rank


def make_order(name: str, cache: Cache, max_wait: float, seed: int = 0) -> FirstCome | Ranked:
    ranks: dict[str, Callable[[list[Sequence]], list[Sequence]]] = {
        "lpm": longest_prefix(cache),
        "dfs-weight": depth_first(cache),
        "lof": longest_output,
        "random": shuffled(seed),
    }
    return FirstCome() if name == "fcfs" else Ranked(ranks[name], max_wait)


class WaitEstimate:
    """How long a request that joins the queue will wait: those ahead of it, at the pace of those before."""

    ENTRIES = 64
    SHORTEST, LONGEST = 1.0, 600.0

    def __init__(self) -> None:
        self._entered: deque[float] = deque(maxlen=self.ENTRIES)

    def entered(self, now: float) -> None:
        """A waiting sequence started at `now`."""
        self._entered.append(now)

    def seconds(self, ahead: int) -> float:
        """Until `ahead` sequences have started. The shortest wait where nothing is known yet."""
        times = self._entered
        if len(times) < 2:
            return self.SHORTEST
        each = (times[-1] - times[0]) / (len(times) - 1)
        return min(max(ahead * each, self.SHORTEST), self.LONGEST)


class OutputEstimate:
    """How much of what running sequences may still generate is set aside when a new one asks to enter.

    `ratio` starts at 0.7 times the configured conservativeness and falls linearly, over 600 steps without a pause, to
    0.14 of its start. A pause shows that it was too low: it jumps to what the running sequences are seen to need.
    """

    START, FLOOR, STEPS = 0.7, 0.14, 600
    #: Nobody is counted for more than this many tokens to come: huge limits are rarely used up.
    CLIP = 4096

    def __init__(self, conservativeness: float) -> None:
        self._start = min(self.START * conservativeness, 1.0)
        self._floor = self._start * self.FLOOR
        self._fall = (self._start - self._floor) / self.STEPS
        self.ratio = self._start

    def step(self) -> None:
        self.ratio = max(self._floor, self.ratio - self._fall)

    def paused(self, running: Iterable[Sequence]) -> None:
        """A sequence had to be paused; `running` are those that go on."""
        done = wanted = count = 0
        for s in running:
            done += s.generated
            wanted += s.limit - s.prompt_len
            count += 1
        self.ratio = min(1.0, (done + 20 * count) / (wanted + 1))

    def expected(self, sequence: Sequence) -> float:
        """Tokens it is expected to generate from here."""
        return min(sequence.remaining, self.CLIP) * self.ratio
