"""This module owns leases and who may have which page: `RadixManager`, the cache over the radix tree."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from radixlm.base.errors import Internal, StartupError
from radixlm.base.plan import Ints
from radixlm.cache.audit import audit
from radixlm.cache.eviction import policy_named
from radixlm.cache.pages import FreePages
from radixlm.cache.ports import Lease
from radixlm.cache.radix import NodeView, RadixTree

#: Pages evicted at once when free pages run out, at least (in small pools, less): rows grow one page at a time, and one
#: eviction then serves many of them.
_BATCH = 256


class RadixManager:
    """The `Cache` of `cache.ports` over a radix tree. One thread uses it.

    A page is free, or in one tree node, or in one open lease beyond its published part. A lease that is closed before
    it ever grew (an admission that was undone) counts neither here nor as a use in the eviction policies.

    Attributes:
        query_tokens, hit_tokens: tokens that leases asked for when opened, and how many of these were cached. Counted
            when the lease first grows.
        evicted_tokens, evictions: tokens evicted, and runs shortened or removed for it.
    """

    def __init__(self, pages: int, page_size: int, policy: str = "lru") -> None:
        """
        Args:
            pages: pages in the pool; their ids are `0 .. pages - 1`.
            page_size: tokens in a page.
            policy: name of an eviction policy, see `cache.eviction`.
        """
        if page_size < 1:
            raise StartupError(f"page_size is {page_size}; it must be at least 1")
        self.pages = pages
        self.page_size = page_size
        self.query_tokens = 0
        self.hit_tokens = 0
        self.evicted_tokens = 0
        self.evictions = 0
        self._free = FreePages(pages)
        self._tree = RadixTree(page_size, policy_named(policy))
        self._leases: dict[Lease, int] = {}  # open ones -> tokens asked for
        self._batch = min(_BATCH, max(1, pages // 64))

    def match(self, tokens: Ints, namespace: str) -> int:
        """How many leading tokens are in the tree (a multiple of the page size). Pins nothing, touches no recency."""
        return self._tree.follow(_int32(tokens), namespace)[1]

    def path(self, tokens: Ints, namespace: str) -> tuple[int, ...]:
        """Ids of the tree nodes that `match` walks through, root side first. Pins nothing."""
        return tuple(node.id for node in self._tree.follow(_int32(tokens), namespace)[0])

    def open(self, tokens: Ints, namespace: str, limit: int, priority: int = 0) -> Lease:
        """Pin the longest cached prefix of at most `limit` tokens and return the hold on it. It may be empty."""
        tree, tokens = self._tree, _int32(tokens)
        stop = min(limit, len(tokens)) // self.page_size * self.page_size
        node, matched, runs = tree.descend(tree.root(namespace), tokens, 0, stop)
        tree.pin(node, None, priority)
        pages: list[int] = []
        for run in runs:
            pages += run.tolist()
        lease = Lease(namespace, pages, matched, node, priority)
        self._leases[lease] = len(tokens)
        return lease

    def grow(self, lease: Lease, upto: int) -> bool:
        """Make pages exist for positions below `upto`, evicting unpinned prefixes if needed. False: nothing changed."""
        pages, size = lease.pages, self.page_size
        missing = -(-upto // size) - len(pages)
        if missing <= 0:
            return True
        if lease.closed:
            raise Internal("a closed lease was grown")
        free = self._free
        if missing > free.count:
            if missing > free.count + self._tree.evictable:
                return False
            self._evict(max(missing - free.count, self._batch))
        if len(pages) * size == lease.matched:  # the first page of its own: the prefix is being used
            self.hit_tokens += lease.matched
            self.query_tokens += self._leases[lease]
        if missing == 1:
            pages.append(free.take_one())
        else:
            pages += free.take(missing)
        return True

    def publish(self, lease: Lease, tokens: Ints, upto: int) -> list[tuple[int, int]]:
        """Put the computed tokens `[0, upto)` (whole pages of them) into the tree and pin them.

        Where another sequence was first, its pages become the lease's and the duplicates are freed.

        Args:
            tokens: must agree with the prefix that is published already; that part is not looked at.

        Returns:
            (page index, page id) of each page of this lease that was replaced.
        """
        size = self.page_size
        start, stop = lease.published, upto // size * size
        if lease.closed:
            raise Internal("a closed lease was published")
        if stop <= start:
            return []
        if stop > min(len(tokens), len(lease.pages) * size):
            raise Internal(f"{stop} tokens were published of {len(tokens)} in {len(lease.pages)} pages of {size}")
        tree = self._tree
        node, reached, runs = tree.descend(lease.node, _int32(tokens), start, stop)
        first, split = start // size, reached // size
        moved: list[tuple[int, int]] = []
        if runs:
            canonical: list[int] = np.concatenate(runs).tolist()
            self._free.give(lease.pages[first:split])
            lease.pages[first:split] = canonical
            moved = list(zip(range(first, split), canonical, strict=True))
        if reached < stop:
            own = np.array(lease.pages[split : stop // size], np.int32)
            node = tree.add(node, tokens[reached:stop].copy(), own, lease.priority)
        tree.pin(node, lease.node, lease.priority)
        lease.node = node
        lease.published = stop
        return moved

    def close(self, lease: Lease) -> None:
        """End the hold: unpublished pages are freed, published ones stay, unpinned. Closing twice raises `Internal`."""
        if lease.closed:
            raise Internal("a lease was closed twice")
        del self._leases[lease]
        used = len(lease.pages) * self.page_size > lease.matched
        self._free.give(lease.pages[lease.published // self.page_size :])
        self._tree.unpin(lease.node, used)
        lease.closed = True
        lease.pages = []
        lease.node = None

    def reclaim(self, tokens: int) -> int:
        """Evict at least this many tokens of unpinned prefixes, if there are as many. Returns how many went."""
        return self._evict(-(-tokens // self.page_size)) * self.page_size

    def headroom(self) -> int:
        """Tokens that could be had now: free pages plus everything evictable. O(1)."""
        return (self._free.count + self._tree.evictable) * self.page_size

    def counts(self) -> dict[str, int]:
        """Tokens by owner: `free`, `leased` (outside the tree), `pinned` and `evictable` (in the tree), `total`."""
        free, pinned, evictable = self._free.count, self._tree.pinned, self._tree.evictable
        leased = self.pages - free - pinned - evictable
        named = {"free": free, "leased": leased, "pinned": pinned, "evictable": evictable, "total": self.pages}
        return {name: pages * self.page_size for name, pages in named.items()}

    def nodes(self) -> Iterator[NodeView]:
        """A picture of the tree for people: every node, parents before children. O(nodes)."""
        return self._tree.nodes()

    def audit(self) -> None:
        """Walk everything; raise `AssertionError` naming the first broken invariant."""
        audit(self._free, self._leases, self.page_size, self._tree)

    def _evict(self, count: int) -> int:
        """Move up to `count` pages from the tree to the free list; how many went."""
        runs = self._tree.evict(count)
        if not runs:
            return 0
        pages = np.concatenate(runs)
        self._free.give(pages)
        self.evictions += len(runs)
        self.evicted_tokens += len(pages) * self.page_size
        return len(pages)


def _int32(tokens: Ints) -> Ints:
    # Keys of the tree are bytes of pages: another width would match nothing, silently.
    if tokens.dtype != np.int32:
        raise Internal(f"tokens are {tokens.dtype}; the cache takes int32")
    return tokens
