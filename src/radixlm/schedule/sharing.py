"""This module owns which running rows are told to read a prefix together: the groups of `Plan.shared`.

A page belongs to one node of the tree, so it is reached by one path: two rows that have the same published page at some
index have the same pages at all indices before it. How much two rows share is thus found by bisection, and one look at
a page tells who shares a minimum.

The cost model counts tokens whose keys and values need not be read: a group of n rows over a prefix of d tokens saves
(n - 1) * d. Where prefixes are nested, the tree is walked from the leaves to the root. At a node that lies d tokens
deep, a group of n rows from below, over e > d tokens, would save n * d as a part of a larger group instead of
(n - 1) * e by itself; it joins if that is more, provided that those who join gain more than d together, which is what
it costs to read the node's prefix at all. A group that does not join is final: further up it could only lose.

That is exact for a tree of one branching level. In deeper ones it can miss a little: a group that was made at a node
moves up as a whole, or not at all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Seq
from itertools import accumulate

import numpy as np

from radixlm.base.plan import SharedPrefix
from radixlm.cache.ports import Lease

#: Tokens of the shortest prefix that is worth a tile of its own.
LEAST_LENGTH = 256

#: Tokens that the groups of a step must save together. Sharing costs each layer two more kernels, some 4 us on a GPU
#: that meanwhile reads 16 MB: the keys and values of about 4,000 tokens of a layer with 8 heads of 128.
LEAST_SAVING = 4096

#: Rows (indices into the leases) and how many leading pages they share.
Group = tuple[list[int], int]


def shared_prefixes(
    leases: Seq[Lease], page_size: int, least_length: int = LEAST_LENGTH, least_saving: int = LEAST_SAVING
) -> tuple[SharedPrefix, ...]:
    """Groups of rows that share a prefix worth reading together, none if the whole does not pay.

    Args:
        leases: of the rows, in span order. Only what is published can be shared.
        least_length: tokens of the shortest prefix.
        least_saving: tokens that the groups must save together, else there are none.
    """
    least = max(1, -(-least_length // page_size))
    by_page: dict[int, list[int]] = {}
    for row, lease in enumerate(leases):
        if lease.published >= least * page_size:
            by_page.setdefault(lease.pages[least - 1], []).append(row)
    sharers = [rows for rows in by_page.values() if len(rows) > 1]
    if not sharers:
        return ()
    groups = _partition(_ordered(leases, sharers, page_size, least))
    saving = sum((len(rows) - 1) * pages for rows, pages in groups) * page_size
    if saving < least_saving:
        return ()
    members = np.array([row for rows, _ in groups for row in sorted(rows)], np.int32)
    ends = accumulate(len(rows) for rows, _ in groups)
    return tuple(
        SharedPrefix(members[end - len(rows) : end], pages * page_size)
        for (rows, pages), end in zip(groups, ends, strict=True)
    )


class Sharing:
    """The groups of the last batch, so that the same batch gets the same object again.

    Args:
        on: False if nobody could use the groups: there are none then, at no cost.
    """

    def __init__(self, page_size: int, on: bool) -> None:
        self._page_size = page_size
        self._on = on
        self._batch: list[tuple[Lease, int]] = []
        self._groups: tuple[SharedPrefix, ...] = ()

    def groups(self, leases: Seq[Lease]) -> tuple[SharedPrefix, ...]:
        """`shared_prefixes` of the batch whose leases these are, in span order."""
        if not self._on:
            return ()
        # What a lease shares changes only when more of it is published.
        batch = [(lease, lease.published) for lease in leases]
        if batch != self._batch:
            self._batch = batch
            self._groups = shared_prefixes(leases, self._page_size)
        return self._groups


def _ordered(leases: Seq[Lease], sharers: list[list[int]], page_size: int, least: int) -> list[tuple[int, int]]:
    """(row, pages in common with the row before it) in the order of a walk through the tree: the rows below a node are
    neighbours. The rows of each list share at least `least` pages, those of different lists less.
    """
    order: list[tuple[int, int]] = []
    lengths = [lease.published // page_size for lease in leases]
    rest = [(rows, 0) for rows in sharers]
    same = least
    while rest:
        rows, before = rest.pop()
        if len(rows) == 1:
            order.append((rows[0], before))
            continue
        # All others leave the path of the longest one somewhere; those that leave it last come next.
        head = max(rows, key=lengths.__getitem__)
        order.append((head, before))
        path, low = leases[head].pages, max(before, least)
        if len(rows) == 2:  # they part once, and nothing is left to sort
            other = rows[rows[0] == head]
            same = _common(path, leases[other].pages, low, lengths[other], same)
            order.append((other, same))
            continue
        branches: dict[tuple[int, int], list[int]] = {}
        for row in rows:
            if row == head:
                continue
            pages, length = leases[row].pages, lengths[row]
            same = _common(path, pages, low, length, same)
            # A row that ends on the path is a branch of its own.
            branch = pages[same] if same < length else ~row
            branches.setdefault((same, branch), []).append(row)
        rest.extend((branches[at], at[0]) for at in sorted(branches))
    return order


def _common(a: list[int], b: list[int], low: int, high: int, guess: int) -> int:
    """How many leading pages are the same, at least `low` and at most `high` (neither list is shorter)."""
    if low <= guess <= high and a[guess - 1] == b[guess - 1] and (guess == high or a[guess] != b[guess]):
        return guess
    return bisect_left(range(high), True, low, high, key=lambda i: a[i] != b[i])


def _partition(order: list[tuple[int, int]]) -> list[Group]:
    """Groups by the cost model from rows in walking order: the intervals of equal prefixes are the tree's nodes."""
    final: list[Group] = []
    # Nodes around the current row, outermost first: how many pages deep each is, and what is undecided among its rows.
    depths, insides = [0], list[list[Group]]([[]])
    after = [same for _, same in order[1:]]
    for (row, _), same in zip(order, [*after, 0], strict=True):
        undecided: list[Group] = [([row], 0)]
        while depths[-1] > same:
            undecided = _join(insides.pop() + undecided, depths.pop(), final)
        if depths[-1] < same:
            depths.append(same)
            insides.append(undecided)
        else:
            insides[-1] += undecided
    final += [group for group in insides[0] if len(group[0]) > 1]
    return final


def _join(groups: list[Group], pages: int, final: list[Group]) -> list[Group]:
    """Decide at a node. What stays undecided is returned, what is better off by itself goes to `final`."""
    joining: list[Group] = []
    together: list[int] = []
    gain = 0
    for group in groups:
        rows, own = group
        count = len(rows)
        gains = count * pages - (count - 1) * own
        if gains > 0:
            joining.append(group)
            together += rows
            gain += gains
        else:
            final.append(group)
    return joining if gain <= pages else [(together, pages)]
