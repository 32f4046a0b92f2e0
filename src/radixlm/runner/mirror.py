"""This module owns the device tables as a runner without a device keeps them, and the checks that plans have to pass.

What a slot of the pool would hold is kept as the hash of the prefix that its key and value stand for. So a plan that
reads a page which was freed, overwritten, wrongly remapped or never computed is found out, whoever made it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from radixlm.base.plan import Ints, Join, Plan

Words = npt.NDArray[np.uint64]
Index = npt.NDArray[np.int64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class PlanError(AssertionError):
    """A plan contradicts the ones before it. The message names the row and the position."""


class Mirror:
    """
    Args:
        verify_every: decode steps read the whole context of their rows at every so many steps (longer spans always do).
            1 finds a broken page in the very step that reads it; a larger number keeps long simulations fast.
    """

    def __init__(self, rows: int, context_length: int, pages: int, page_size: int, verify_every: int = 1) -> None:
        columns = context_length + 1
        self.tokens = np.zeros((rows, columns), np.int32)
        self.sums = np.zeros((rows, columns), np.uint64)  # hash of tokens 0 .. position
        self._pages = np.full((rows, -(-columns // page_size)), -1, np.int32)
        self._slots = np.zeros(pages * page_size, np.uint64)  # the hash that each slot was computed for
        self._page_count = pages
        self._page_size = page_size
        self._known = np.zeros(rows, np.int64)  # tokens
        self._computed = np.full(rows, -1, np.int64)  # positions with KV; -1: just joined, its first span will say
        self._held = np.zeros(rows, np.int64)  # positions whose pages came with the join
        self._suspect = np.zeros(rows, np.bool_)  # pages of computed positions are new to the row
        self._verify_every = verify_every
        self._steps = 0

    def apply(self, plan: Plan) -> None:
        """Take in joins and page writes, check the spans, and write what they compute. Raises `PlanError`."""
        self._steps += 1
        for join in plan.joins:
            self._join(join)
        self._write_pages(plan)
        self._write_tokens(plan)
        rows, starts, lengths = (array.astype(np.int64) for array in (plan.rows, plan.starts, plan.lengths))
        self._check_spans(rows, starts, starts + lengths, plan.samples)
        self._check_reads(rows, starts, lengths)
        self._compute(rows, starts, lengths)
        self._computed[rows] = starts + lengths

    def append(self, rows: Index, positions: Index, tokens: Index) -> None:
        """Sampled tokens, each behind the last one known in its row."""
        self.tokens[rows, positions] = tokens
        self.sums[rows, positions] = self.sums[rows, positions - 1] + _terms(tokens, positions)
        self._known[rows] = positions + 1

    def _join(self, join: Join) -> None:
        row, count = join.row, len(join.tokens)
        who = f"join of {join.uid} in row {row}"
        if not 0 <= row < len(self._known):
            raise PlanError(f"{who}: there is no such row")
        if not 0 < join.prompt_len <= count < self.tokens.shape[1]:
            raise PlanError(f"{who}: {count} tokens, {join.prompt_len} of them prompt")
        if len(join.pages) > self._pages.shape[1]:
            raise PlanError(f"{who}: {len(join.pages)} pages are more than a row has")
        self._check_pages(join.pages, who)
        self.tokens[row, :count] = join.tokens
        self.sums[row, :count] = _terms(join.tokens.astype(np.int64), np.arange(count)).cumsum(dtype=np.uint64)
        self._pages[row] = -1
        self._pages[row, : len(join.pages)] = join.pages
        self._known[row], self._computed[row], self._suspect[row] = count, -1, True
        self._held[row] = len(join.pages) * self._page_size

    def _write_pages(self, plan: Plan) -> None:
        if len(plan.page_ids):
            self._check_pages(plan.page_ids, "a page write")
            self._pages[plan.page_rows, plan.page_index] = plan.page_ids
            behind = plan.page_index.astype(np.int64) * self._page_size < self._computed[plan.page_rows]
            self._suspect[plan.page_rows[behind]] = True

    def _write_tokens(self, plan: Plan) -> None:
        """Forced tokens: behind the last one known in their row, or in place of those that were sampled there."""
        places = zip(plan.token_rows.tolist(), plan.token_positions.tolist(), plan.token_ids.tolist(), strict=True)
        for row, position, token in places:
            if not self._computed[row] <= position <= self._known[row]:
                raise PlanError(f"row {row}: a token is written at {position}, which is computed or beyond the known")
            here = np.array([position])
            self.append(np.array([row]), here, np.array([token]))

    def _check_pages(self, pages: Ints, who: str) -> None:
        if len(pages) and (pages.min() < 0 or pages.max() >= self._page_count):
            raise PlanError(f"{who} names a page outside 0 .. {self._page_count - 1}")

    def _check_spans(self, rows: Index, starts: Index, ends: Index, samples: npt.NDArray[np.bool_]) -> None:
        computed, known = self._computed[rows], self._known[rows]
        first = computed < 0
        twice = np.zeros(len(rows), np.bool_)
        twice[np.setdiff1d(np.arange(len(rows)), np.unique(rows, return_index=True)[1])] = True
        _refuse(twice, "row {row} has two spans in one step", rows, starts)
        _refuse(ends <= starts, "row {row}: an empty span at {position}", rows, starts)
        moved = ~first & (starts != computed)
        _refuse(moved, "row {row}: a span starts at {position}, not where the last one ended", rows, starts)
        hole = first & (starts > self._held[rows])
        _refuse(hole, "row {row}: positions before {position} were never computed", rows, starts)
        _refuse(ends > known, "row {row}: a span ends at {position}, beyond the known tokens", rows, ends)
        _refuse(samples & (ends != known), "row {row}: position {position} is sampled, but is known", rows, ends)

    def _check_reads(self, rows: Index, starts: Index, lengths: Index) -> None:
        """Positions before a span must have been computed, for exactly the tokens of its row."""
        if self._steps % self._verify_every:
            looked = (lengths > 1) | self._suspect[rows]
            rows, starts = rows[looked], starts[looked]
        if len(rows):
            token_rows, positions = _spread(rows, np.zeros_like(starts), starts)
            slots = self._places(token_rows, positions)
            wrong = self._slots[slots] != self.sums[token_rows, positions]
            _refuse(
                wrong, "row {row} reads position {position}, but its page holds something else", token_rows, positions
            )
            self._suspect[rows] = False

    def _compute(self, rows: Index, starts: Index, lengths: Index) -> None:
        token_rows, positions = _spread(rows, starts, lengths)
        slots, sums = self._places(token_rows, positions), self.sums[token_rows, positions]
        self._slots[slots] = sums
        lost = self._slots[slots] != sums
        _refuse(
            lost, "position {position} of row {row} has the same place as another in this step", token_rows, positions
        )

    def _places(self, rows: Index, positions: Index) -> Index:
        pages = self._pages[rows, positions // self._page_size].astype(np.int64)
        _refuse(pages < 0, "row {row} has no page for position {position}", rows, positions)
        return pages * self._page_size + positions % self._page_size


def mix(words: Words) -> Words:
    """The SplitMix64 finaliser: every bit of the answer depends on every bit of the word."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def fractions(words: Words) -> npt.NDArray[np.float64]:
    """The words as numbers in [0, 1)."""
    numbers: npt.NDArray[np.float64] = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def _terms(tokens: Index, positions: Index) -> Words:
    """What each token adds to the hash of its text. A sum, so that a text can be hashed in any pieces."""
    return mix(tokens.view(np.uint64) + (positions.view(np.uint64) + np.uint64(1)) * GOLDEN)


def _spread(rows: Index, starts: Index, lengths: Index) -> tuple[Index, Index]:
    """(row, position) of every token of spans laid end to end."""
    ends = lengths.cumsum()
    return rows.repeat(lengths), np.arange(lengths.sum()) + (starts + lengths - ends).repeat(lengths)


def _refuse(wrong: npt.NDArray[np.bool_], message: str, rows: Index, positions: Index) -> None:
    if wrong.any():
        i = int(wrong.argmax())
        raise PlanError(message.format(row=int(rows[i]), position=int(positions[i])))
