"""This module owns where a step's attention reads on a CPU: which rows are taken together and which slots they need.

Only integers here (numpy); the arithmetic is in `cpu_decode` and `cpu_extend`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from radixlm.attention.base import StepInputs

Indices = npt.NDArray[np.int64]

#: Slots to read: a slice where they are consecutive, else an index tensor.
Place = slice | torch.Tensor

#: Bytes of keys and values that one block gathers, so that they are still in the cache when they are multiplied.
BLOCK_BYTES = 4 << 20
#: Bytes of one block's score matrix.
SCORE_BYTES = 4 << 20
#: Bytes of reading per layer that a shared prefix must save to be worth its two further products.
WORTH_BYTES = 1 << 20
#: Rows of a block are padded to the longest; a shorter row joins if it fills this share of it, or lacks few tokens.
FILL = 0.75
SLACK = 32


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Tokens `[first, last)` of the step: the positions from `start` on of the row whose pages are `pages`."""

    first: int
    last: int
    start: int
    pages: Indices

    @property
    def end(self) -> int:
        """Positions that the span's last token sees."""
        return self.start + self.last - self.first


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Decode rows that are computed together. Each reads `shared`, then its own slots.

    Attributes:
        rows: [n] indices into the step's decode spans.
        shared: where the positions all rows have in common lie; None if there are none.
        shared_len: how many those are.
        own: [n, longest] slots (at least the current token's), a row's last one repeated where it has fewer.
        own_lens: [n] valid entries of each row.
    """

    rows: list[int]
    shared: Place | None
    shared_len: int
    own: Indices
    own_lens: Indices


def split(inputs: StepInputs) -> tuple[list[Span], list[Span]]:
    """(extend spans, decode spans) of a step. A decode span is one token long."""
    table = inputs.page_table.numpy()
    extends: list[Span] = []
    decodes: list[Span] = []
    first = 0
    for row, start, length in zip(inputs.rows.tolist(), inputs.starts, inputs.lengths, strict=True):
        used = -(-(start + length) // inputs.page_size)
        span = Span(first, first + length, start, table[row, :used])
        (decodes if length == 1 else extends).append(span)
        first += length
    return extends, decodes


def place(pages: Indices, page_size: int, first: int, last: int) -> Place:
    """Where positions `[first, last)` of a row lie."""
    low, high = first // page_size, -(-last // page_size)
    needed = pages[low:high]
    if np.all(np.diff(needed) == 1):
        begin = int(needed[0]) * page_size + first - low * page_size
        return slice(begin, begin + last - first)
    return torch.from_numpy(_slots(pages, page_size, np.arange(first, last)))


def consecutive(slots: torch.Tensor) -> Place:
    """slots, as a slice if they are consecutive."""
    numbers = slots.numpy()
    if len(numbers) and np.all(np.diff(numbers) == 1):
        return slice(int(numbers[0]), int(numbers[0]) + len(numbers))
    return slots


def groups(spans: list[Span], page_size: int, window: int, token_bytes: int, score_bytes: int) -> list[Group]:
    """Cut decode spans into groups.

    Args:
        window: positions a query sees, itself included (0: all).
        token_bytes: keys and values of one token in one layer.
        score_bytes: scores of one (row, position) pair over all heads.
    """
    ends = np.array([span.end for span in spans])
    begins = np.maximum(ends - window, 0) if window else np.zeros_like(ends)
    rest = set(range(len(spans)))
    made: list[Group] = []

    def cut(rows: Iterable[int], shared: Place | None, shared_len: int) -> None:
        lens = {row: int(ends[row] - begins[row]) - shared_len for row in rows}
        for part in _parts(lens, shared_len, token_bytes, score_bytes):
            positions = begins[part][:, None] + shared_len + np.arange(lens[part[0]])
            own = _own_slots([spans[row].pages for row in part], page_size, positions, ends[part] - 1)
            made.append(Group(part, shared, shared_len, own, np.array([lens[row] for row in part])))

    if not begins.any():
        for rows, length in _sharing(spans, page_size, token_bytes):
            cut(rows, place(spans[rows[0]].pages, page_size, 0, length), length)
            rest.difference_update(rows)
    if rest:
        cut(rest, None, 0)
    return made


def _parts(lens: dict[int, int], shared_len: int, token_bytes: int, score_bytes: int) -> Iterator[list[int]]:
    """Rows (the keys of lens) of similar length together, longest first, each part within the byte limits."""
    part: list[int] = []
    for row in sorted(lens, key=lambda row: -lens[row]):
        if part:
            longest, count = lens[part[0]], len(part) + 1
            similar = lens[row] >= longest * FILL or longest - lens[row] <= SLACK
            gathered, scores = count * longest * token_bytes, count * (longest + shared_len) * score_bytes
            if not similar or gathered > BLOCK_BYTES or scores > SCORE_BYTES:
                yield part
                part = []
        part.append(row)
    yield part


def _sharing(spans: list[Span], page_size: int, token_bytes: int) -> Iterator[tuple[list[int], int]]:
    """(rows, length) of sets of rows whose first `length` positions lie in the same pages.

    Rows are sorted by their pages, so that sharers are neighbours; a set grows while that saves more reading.
    """
    # The page of the current token is being written, so it belongs to one row.
    full = [span.pages[: (span.end - 1) // page_size] for span in spans]
    order = sorted(range(len(spans)), key=lambda row: full[row].tobytes())
    rows, common = order[:1], 0

    def worth() -> bool:
        return (len(rows) - 1) * common * page_size * token_bytes >= WORTH_BYTES

    for row in order[1:]:
        both = _common(full[rows[-1]], full[row])
        longer = both if len(rows) == 1 else min(common, both)
        if len(rows) * longer >= max(1, (len(rows) - 1) * common):
            rows, common = [*rows, row], longer
            continue
        if worth():
            yield rows, common * page_size
        rows, common = [row], 0
    if worth():
        yield rows, common * page_size


def _common(a: Indices, b: Indices) -> int:
    """Leading elements that are equal."""
    count = min(len(a), len(b))
    if not count or a[0] != b[0]:
        return 0
    differs = a[:count] != b[:count]
    return int(differs.argmax()) if differs.any() else count


def _slots(pages: Indices, page_size: int, positions: Indices) -> Indices:
    return pages[positions // page_size].astype(np.int64) * page_size + positions % page_size


def _own_slots(pages: list[Indices], page_size: int, positions: Indices, last: Indices) -> Indices:
    """[n, longest] slots of positions [n, longest], each clipped to the row's last position."""
    clipped = np.minimum(positions, last[:, None])
    rows = [_slots(row, page_size, wanted) for row, wanted in zip(pages, clipped, strict=True)]
    return np.stack(rows)
