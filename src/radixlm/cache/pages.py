"""This module owns the list of free pages: `FreePages`, which hands page ids out and takes them back."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from radixlm.base.errors import Internal, StartupError
from radixlm.base.plan import Ints

#: Requests of up to this many pages are served from a short Python list, which pops faster than an array slices.
_HEAD = 64
#: How far a large request looks for pages in one run before it takes the lowest ones, scattered as they are.
_SEARCH = 16384


class FreePages:
    """The free pages of a pool of `total`, ids `0 .. total - 1`, lowest first.

    Free ids wait in three places: `_head`, a short list in descending order that ends with the lowest id;
    `_body[_next:]`, an ascending array whose ids are all above the head's; and `_returned`, what came back since. When
    head and body are short of a request, all three become a new body, in order, so that runs form again. In the common
    case a page costs a pop or its share of a slice.
    """

    __slots__ = ("_body", "_flags", "_head", "_next", "_returned", "_taken", "count", "total")

    def __init__(self, total: int) -> None:
        if total < 1:
            raise StartupError(f"the KV pool has {total} pages; it needs at least 1 (see --max-total-tokens)")
        self.total = total
        self.count = total
        self._head: list[int] = []
        self._body: Ints = np.arange(total, dtype=np.int32)
        self._next = 0
        self._returned = array("i")
        # The same bytes twice: a bytearray is the fastest to set one by one, an array to set many.
        self._flags = bytearray(total)
        self._taken = np.frombuffer(self._flags, np.bool_)

    def take_one(self) -> int:
        """The lowest free page at hand. Raises `Internal` when none is free."""
        if not self._head:
            self._refill(1)
        page = self._head.pop()
        self._flags[page] = 1
        self.count -= 1
        return page

    def take(self, count: int) -> list[int]:
        """`count` pages in ascending order, in one run where there is one. Raises `Internal` when fewer are free."""
        if count <= 0:
            return []
        if count > _HEAD:
            return self._take_run(count)
        if count > len(self._head):
            self._refill(count)
        pages = self._head[-count:]
        del self._head[-count:]
        pages.reverse()
        for page in pages:
            self._flags[page] = 1
        self.count -= count
        return pages

    def give(self, pages: Sequence[int] | Ints) -> None:
        """Take pages back. Raises `Internal`, and changes nothing, if one of them is not out or is named twice."""
        if not len(pages):
            return
        returned: Ints = np.sort(np.asarray(pages, dtype=np.int32))
        if returned[0] < 0 or returned[-1] >= self.total:
            raise Internal(
                f"a page that does not exist was freed: ids are {returned[0]} to {returned[-1]} of {self.total}"
            )
        out = self._taken[returned]
        if not out.all():
            raise Internal(f"page {returned[out.argmin()]} was freed, but it is free already")
        again = returned[1:] == returned[:-1]
        if again.any():
            raise Internal(f"page {returned[again.argmax()]} was freed twice at once")
        self._taken[returned] = False
        self._returned.frombytes(returned.tobytes())
        self.count += len(returned)

    def listed(self) -> Ints:
        """Every free page, in no particular order. Raises `AssertionError` where the books disagree. O(total)."""
        body = self._body[self._next :]
        pages = np.concatenate([np.array(self._head, np.int32), body, np.array(self._returned, np.int32)])
        if len(pages) != self.count:
            raise AssertionError(f"{len(pages)} pages are listed as free, the counter says {self.count}")
        if not np.array_equal(np.sort(pages), np.flatnonzero(~self._taken)):
            raise AssertionError("the pages listed as free are not the ones flagged as free")
        ordered = np.concatenate([np.array(self._head[::-1], np.int32), body])
        if (ordered[1:] <= ordered[:-1]).any():
            raise AssertionError("the head and body of the free list are not in ascending order")
        return pages

    def _refill(self, count: int) -> None:
        """Lengthen the head to at least `count` pages, which is at most `_HEAD`."""
        if len(self._head) + len(self._body) - self._next < count:
            self._gather(count)
        stop = min(self._next + _HEAD, len(self._body))
        self._head = self._body[self._next : stop][::-1].tolist() + self._head
        self._next = stop

    def _take_run(self, count: int) -> list[int]:
        if len(self._body) - self._next < count:
            self._gather(count)
        body, start = self._body, self._next
        if body[start + count - 1] - body[start] != count - 1:
            self._bring_run(count)
        taken = body[start : start + count]
        self._next = start + count
        self._taken[taken] = True
        self.count -= count
        pages: list[int] = taken.tolist()
        return pages

    def _bring_run(self, count: int) -> None:
        """Rotate the first run of `count` consecutive ids within reach to the front of the body, if there is one."""
        reach = self._body[self._next : self._next + _SEARCH + count]
        whole = reach[count - 1 :] - reach[: len(reach) - count + 1] == count - 1
        found = int(whole.argmax())
        if whole[found]:
            run = reach[found : found + count].copy()
            reach[count : found + count] = reach[:found].copy()
            reach[:count] = run
            # The run's ids are above those it passed; they leave with this request, so the rest stays in order.

    def _gather(self, count: int) -> None:
        """Make a new body of all free ids, in order."""
        if count > self.count:
            raise Internal(f"{count} pages were taken where {self.count} are free; ask `count` first")
        if self.count > self.total // 16:  # reading the flags of all pages is cheaper than sorting so many
            self._body = np.flatnonzero(~self._taken).astype(np.int32)
        else:
            parts = [np.array(self._head, np.int32), self._body[self._next :], np.array(self._returned, np.int32)]
            self._body = np.sort(np.concatenate(parts))
        self._head, self._next, self._returned = [], 0, array("i")
