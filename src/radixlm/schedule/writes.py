"""This module owns writes to the row tables that the next plan will carry: runs of pages, or of tokens."""

from __future__ import annotations

from itertools import chain

import numpy as np

from radixlm.base.plan import NO_INTS, Ints


class Writes:
    """Runs of numbers, each for one row from one column on, in the order in which they are to be applied."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._firsts: list[int] = []
        self._runs: list[list[int]] = []

    def __bool__(self) -> bool:
        return bool(self._rows)

    def add(self, row: int, first: int, run: list[int]) -> None:
        self._rows.append(row)
        self._firsts.append(first)
        self._runs.append(run)

    def forget(self, row: int) -> None:
        """Its sequence has left: what was still to be written would hit the row's next one."""
        if row in self._rows:
            kept = [i for i, other in enumerate(self._rows) if other != row]
            self._rows = [self._rows[i] for i in kept]
            self._firsts = [self._firsts[i] for i in kept]
            self._runs = [self._runs[i] for i in kept]

    def take(self) -> tuple[Ints, Ints, Ints]:
        """(rows, columns, numbers) of everything added since the last time, an entry per number."""
        if not self._rows:
            return NO_INTS, NO_INTS, NO_INTS
        counts = np.array([len(run) for run in self._runs], np.int32)
        ends = counts.cumsum(dtype=np.int32)
        total = int(ends[-1])
        rows = np.array(self._rows, np.int32).repeat(counts)
        index = np.arange(total, dtype=np.int32) + (np.array(self._firsts, np.int32) - ends + counts).repeat(counts)
        ids = np.fromiter(chain.from_iterable(self._runs), np.int32, total)
        for column in (self._rows, self._firsts, self._runs):
            column.clear()
        return rows, index, ids
