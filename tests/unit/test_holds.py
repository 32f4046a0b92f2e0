"""Soft holds on prefixes: they outlive everything that nobody holds, and never stand in anybody's way."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixlm.cache.holds import MAX_BRANCHES, Holds
from radixlm.cache.manager import RadixManager
from radixlm.cache.nocache import NoCache


def ints(*tokens: int) -> Any:
    return np.array(tokens, np.int32)


def put(cache: Holds, tokens: Any) -> None:
    """As a sequence that computed these tokens and ended."""
    lease = cache.open(tokens, "", len(tokens) - 1)
    assert cache.grow(lease, len(tokens))
    cache.publish(lease, tokens, len(tokens))
    cache.close(lease)


def test_what_is_held_stays_while_there_is_anything_else() -> None:
    cache = Holds(RadixManager(20, 1))
    held, other = ints(*range(8)), ints(*range(100, 108))
    put(cache, held)
    cache.hold("s", held, "")
    put(cache, other)
    put(cache, ints(*range(200, 210)))  # needs pages that are held or that are not
    assert cache.match(held, "") == 8 and cache.match(other, "") < 8
    assert cache.headroom() == 20 and cache.held == 8
    put(cache, ints(*range(300, 320)))  # needs all there are
    assert cache.match(held, "") == 0 and cache.held == 0
    cache.audit()
    cache.drop("s")
    cache.drop("unheard of")


def test_a_turn_takes_the_place_of_the_one_before() -> None:
    cache = Holds(RadixManager(64, 1))
    one, two, branch = ints(1, 2), ints(1, 2, 3, 4), ints(1, 2, 9)
    for tokens in (one, two, branch):
        put(cache, tokens)
        cache.hold("s", tokens, "")
    assert cache.held == 7  # two and branch
    cache.drop("s")
    assert cache.held == 0 and cache.counts()["pinned"] == 0
    for i in range(MAX_BRANCHES + 3):
        put(cache, ints(50 + i))
        cache.hold("s", ints(50 + i), "")
    assert cache.held == MAX_BRANCHES
    cache.audit()


def test_flushing_takes_what_is_held() -> None:
    cache = Holds(RadixManager(32, 4))
    put(cache, ints(*range(16)))
    cache.hold("s", ints(*range(16)), "")
    assert cache.reclaim(32) == 16 and cache.held == 0 and cache.match(ints(*range(16)), "") == 0
    nothing = Holds(NoCache(8, 1))
    nothing.hold("s", ints(1, 2), "")
    assert nothing.held == 0 and nothing.headroom() == 8
    nothing.audit()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), page_size=st.sampled_from([1, 4]))
def test_anything_that_fits_can_be_had(seed: int, page_size: int) -> None:
    """Random turns of random sessions: a lease that asks for no more than there is beside open leases always grows."""
    rng = random.Random(seed)
    pages = 24
    cache = Holds(RadixManager(pages, page_size))
    stems = [[rng.randrange(6) for _ in range(3 * page_size)] for _ in range(3)]
    open_leases: list[tuple[Any, Any]] = []
    for _ in range(60):
        action = rng.randrange(4)
        if action == 0 and len(open_leases) < 3:
            tokens = ints(*rng.choice(stems), *[rng.randrange(6) for _ in range(rng.randrange(1, 4 * page_size))])
            lease = cache.open(tokens, "", len(tokens) - 1)
            assert cache.grow(lease, len(tokens)), "three leases of seven pages each fit into 24"
            open_leases.append((lease, tokens))
        elif action == 1 and open_leases:
            lease, tokens = open_leases.pop(rng.randrange(len(open_leases)))
            cache.publish(lease, tokens, len(tokens))
            if rng.random() < 0.7:
                cache.hold(f"s{rng.randrange(3)}", tokens, "")
            cache.close(lease)
        elif action == 2:
            cache.drop(f"s{rng.randrange(3)}")
        else:
            cache.reclaim(rng.randrange(3) * page_size)
        cache.audit()
        counts = cache.counts()
        assert counts["free"] + counts["evictable"] <= cache.headroom() <= pages * page_size
    for lease, _ in open_leases:
        cache.close(lease)
    for name in ("s0", "s1", "s2"):
        cache.drop(name)
    assert cache.counts()["pinned"] == 0 and cache.held == 0
    cache.audit()


def test_the_rest_is_the_caches_own() -> None:
    inner = RadixManager(8, 1)
    cache = Holds(inner)
    put(cache, ints(1, 2, 3))
    assert cache.hit_tokens == inner.hit_tokens and [*cache.nodes()] == [*inner.nodes()]
    with pytest.raises(AttributeError):
        cache.no_such_thing  # noqa: B018
