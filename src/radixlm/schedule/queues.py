"""This module owns who waits and who runs: the waiting queue in order of arrival, and the free rows."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator

from radixlm.schedule.policy import by_arrival
from radixlm.schedule.sequence import Sequence


class WaitingQueue:
    """Waiting sequences by priority, then arrival. `version` changes with every change, so that an order can be
    kept; `tenants` counts them by whose they are.
    """

    def __init__(self) -> None:
        self._items: list[Sequence] = []
        self.tenants: Counter[str] = Counter()
        self.version = 0

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)

    def add(self, sequence: Sequence) -> None:
        """A paused sequence keeps its arrival time, so it comes back ahead of those that arrived after it."""
        bisect.insort(self._items, sequence, key=by_arrival)
        self.tenants[sequence.request.tenant] += 1
        self.version += 1

    def remove(self, sequence: Sequence) -> None:
        at = bisect.bisect_left(self._items, by_arrival(sequence), key=by_arrival)
        if at == len(self._items) or self._items[at] is not sequence:
            raise KeyError(sequence.uid)
        del self._items[at]
        self.tenants[sequence.request.tenant] -= 1
        self.version += 1

    def as_list(self) -> list[Sequence]:
        return self._items


class Rows:
    """Rows of the device tables. The smallest free one is taken, so that rows in use stay dense."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count))  # kept sorted, smallest last

        self._free.reverse()

    def __len__(self) -> int:
        return len(self._free)

    def take(self) -> int:
        return self._free.pop()

    def give(self, row: int) -> None:
        bisect.insort(self._free, row, key=lambda r: -r)
