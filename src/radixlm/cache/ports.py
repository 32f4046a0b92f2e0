"""This module owns the cache's port: the five verbs and two questions that the scheduler knows, and `Lease`."""

from __future__ import annotations

from typing import Any, Protocol

from radixlm.base.plan import Ints


class Lease:
    """One sequence's hold on pages: a pinned prefix in the tree, then pages of its own. Only `cache.manager` changes
    it.

    Attributes:
        pages: page ids from position 0 on, `pages[p // page_size]` holds position p. A list of ints; never reordered.
        matched: tokens found in the tree when it was opened (a multiple of the page size).
        published: tokens from position 0 that belong to the tree by now (a multiple of the page size).
        node: the tree node up to which the path is pinned (opaque).
    """

    __slots__ = ("namespace", "pages", "matched", "published", "node", "closed", "priority")

    def __init__(self, namespace: str, pages: list[int], matched: int, node: Any, priority: int = 0) -> None:
        self.namespace = namespace
        self.pages = pages
        self.matched = matched
        self.published = matched
        self.node = node
        self.priority = priority
        self.closed = False


class Cache(Protocol):
    """Verbs: open, grow, publish, close, reclaim. Questions: headroom, audit (and match and path, which change
    nothing).

    Token arguments are int32 arrays starting at position 0.
    """

    page_size: int
    pages: int

    @property
    def evicted_tokens(self) -> int:
        """Since the start."""
        ...

    def match(self, tokens: Ints, namespace: str) -> int:
        """How many leading tokens are in the tree (a multiple of the page size). Pins nothing, touches no recency."""
        ...

    def path(self, tokens: Ints, namespace: str) -> tuple[int, ...]:
        """Ids of the tree nodes that `match` walks through, root side first. Pins nothing."""
        ...

    def open(self, tokens: Ints, namespace: str, limit: int, priority: int = 0) -> Lease:
        """Pin the longest cached prefix of at most `limit` tokens and return the hold on it. Never fails: may match
        nothing.
        """
        ...

    def grow(self, lease: Lease, upto: int) -> bool:
        """Make pages exist for positions below `upto`, evicting unpinned prefixes if needed. False: nothing changed."""
        ...

    def publish(self, lease: Lease, tokens: Ints, upto: int) -> list[tuple[int, int]]:
        """Put the computed tokens `[0, upto)` (whole pages of them) into the tree and pin them.

        Where another sequence was first, its pages become the lease's and the duplicates are freed.

        Returns:
            (page index, page id) of each page of this lease that was replaced.
        """
        ...

    def close(self, lease: Lease) -> None:
        """End the hold: unpublished pages are freed, published ones stay in the tree, unpinned. Closing twice
        raises.
        """
        ...

    def reclaim(self, tokens: int) -> int:
        """Evict at least this many tokens of unpinned prefixes, if there are as many. Returns how many went."""
        ...

    def headroom(self) -> int:
        """Tokens that could be had now: free pages plus everything evictable."""
        ...

    def counts(self) -> dict[str, int]:
        """Tokens by owner: `free`, `leased` (held by leases outside the tree), `pinned` and `evictable` (in the tree),
        `total`.
        """
        ...

    def audit(self) -> None:
        """Walk everything; raise `AssertionError` naming the first broken invariant."""
        ...
