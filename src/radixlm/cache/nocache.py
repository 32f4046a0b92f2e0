"""This module owns pages without reuse: `NoCache`, the cache of `--disable-radix-cache`, which keeps nothing."""

from __future__ import annotations

from collections.abc import Iterator

from radixlm.base.errors import Internal, StartupError
from radixlm.base.plan import Ints
from radixlm.cache.audit import audit
from radixlm.cache.pages import FreePages
from radixlm.cache.ports import Lease
from radixlm.cache.radix import NodeView


class NoCache:
    """The `Cache` of `cache.ports` in which every page is free or in one open lease. Counters as of `RadixManager`."""

    def __init__(self, pages: int, page_size: int) -> None:
        if page_size < 1:
            raise StartupError(f"page_size is {page_size}; it must be at least 1")
        self.pages = pages
        self.page_size = page_size
        self.query_tokens = 0
        self.hit_tokens = 0
        self.evicted_tokens = 0
        self.evictions = 0
        self._free = FreePages(pages)
        self._leases: dict[Lease, int] = {}  # open ones -> tokens asked for

    def match(self, tokens: Ints, namespace: str) -> int:
        """0."""
        return 0

    def path(self, tokens: Ints, namespace: str) -> tuple[int, ...]:
        """Nothing."""
        return ()

    def open(self, tokens: Ints, namespace: str, limit: int, priority: int = 0) -> Lease:
        """A hold on nothing yet."""
        lease = Lease(namespace, [], 0, None, priority)
        self._leases[lease] = len(tokens)
        return lease

    def grow(self, lease: Lease, upto: int) -> bool:
        """Make pages exist for positions below `upto`. False: there are not enough, nothing changed."""
        pages = lease.pages
        missing = -(-upto // self.page_size) - len(pages)
        if missing <= 0:
            return True
        if lease.closed:
            raise Internal("a closed lease was grown")
        if missing > self._free.count:
            return False
        if not pages:
            self.query_tokens += self._leases[lease]
        pages += self._free.take(missing)
        return True

    def publish(self, lease: Lease, tokens: Ints, upto: int) -> list[tuple[int, int]]:
        """Nothing is kept and nothing replaced."""
        if lease.closed:
            raise Internal("a closed lease was published")
        return []

    def close(self, lease: Lease) -> None:
        """End the hold and free its pages. Closing twice raises."""
        if lease.closed:
            raise Internal("a lease was closed twice")
        del self._leases[lease]
        self._free.give(lease.pages)
        lease.closed = True
        lease.pages = []

    def reclaim(self, tokens: int) -> int:
        """0: there is nothing to evict."""
        return 0

    def headroom(self) -> int:
        """Tokens in free pages."""
        return self._free.count * self.page_size

    def counts(self) -> dict[str, int]:
        """Tokens by owner, with the names of `RadixManager.counts`; none are in a tree."""
        free, total = self._free.count * self.page_size, self.pages * self.page_size
        return {"free": free, "leased": total - free, "pinned": 0, "evictable": 0, "total": total}

    def nodes(self) -> Iterator[NodeView]:
        """No nodes."""
        return iter(())

    def audit(self) -> None:
        """Walk everything; raise `AssertionError` naming the first broken invariant."""
        audit(self._free, self._leases, self.page_size)
