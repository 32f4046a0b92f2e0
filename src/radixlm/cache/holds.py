"""This module owns prefixes that are held softly: they are evicted after everything else, and before anybody waits."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np

from radixlm.base.plan import Ints
from radixlm.cache.ports import Cache, Lease

#: Prefixes held under one name at most. Turns of a conversation that go on from each other are one prefix.
MAX_BRANCHES = 16


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A hold on a prefix. `tokens` are those that are in the tree."""

    lease: Lease
    tokens: Ints


class Holds:
    """The `Cache` of `cache.ports` over another one, with prefixes that are pinned as long as nobody needs their pages.

    A hold is a lease of its own. When a lease cannot grow otherwise, holds are given up, the least recently used name
    first, until it can. What is held counts as headroom: it may be counted more than once where prefixes are shared, so
    `headroom` is at most too high, and `grow` has the last word.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._holds: OrderedDict[str, list[Held]] = OrderedDict()
        self._held = 0  # tokens
        self.pages = cache.pages
        self.page_size = cache.page_size
        # The other verbs are the cache's own, without a step between.
        self.match = cache.match
        self.path = cache.path
        self.open = cache.open
        self.publish = cache.publish
        self.close = cache.close
        self.counts = cache.counts
        self.audit = cache.audit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    @property
    def evicted_tokens(self) -> int:
        return self._cache.evicted_tokens

    @property
    def held(self) -> int:
        """Tokens of all holds; shared prefixes count once for each."""
        return self._held

    # ---- holding

    def hold(self, name: str, tokens: Ints, namespace: str) -> None:
        """Hold what the tree has of `tokens` under a name, in place of the prefixes of it that the name holds."""
        lease = self._cache.open(tokens, namespace, len(tokens))
        if not lease.matched:
            self._cache.close(lease)
            return
        new = Held(lease, tokens[: lease.matched].copy())
        before = self._holds.pop(name, [])
        kept = [held for held in before if not _begins(new.tokens, held.tokens)]
        for held in before:
            if held not in kept:
                self._release(held)
        kept.append(new)
        self._held += lease.matched
        if len(kept) > MAX_BRANCHES:
            self._release(kept.pop(0))
        self._holds[name] = kept

    def drop(self, name: str) -> None:
        """End the holds of a name; unknown names are ignored."""
        for held in self._holds.pop(name, ()):
            self._release(held)

    def _give_up(self) -> None:
        """End the hold that was used least recently."""
        name, held = next(iter(self._holds.items()))
        self._release(held.pop(0))
        if not held:
            del self._holds[name]

    def _release(self, held: Held) -> None:
        self._held -= held.lease.matched
        self._cache.close(held.lease)

    # ---- verbs that holds change

    def grow(self, lease: Lease, upto: int) -> bool:
        """As `Cache.grow`, giving up holds where there is no other way."""
        if self._cache.grow(lease, upto):
            return True
        while self._holds:
            self._give_up()
            if self._cache.grow(lease, upto):
                return True
        return False

    def reclaim(self, tokens: int) -> int:
        """As `Cache.reclaim`, giving up holds where there is no other way."""
        found = self._cache.reclaim(tokens)
        while found < tokens and self._holds:
            self._give_up()
            found += self._cache.reclaim(tokens - found)
        return found

    def headroom(self) -> int:
        """As `Cache.headroom`, with what is held."""
        free = self._cache.headroom()
        return free + min(self._held, self._cache.counts()["pinned"]) if self._held else free


def _begins(tokens: Ints, prefix: Ints) -> bool:
    return len(prefix) <= len(tokens) and np.array_equal(tokens[: len(prefix)], prefix)
