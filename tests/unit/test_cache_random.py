"""Thousands of random operations against a model that knows what every page holds, with `audit` after each one."""

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radixlm.base.plan import Ints
from radixlm.cache.eviction import POLICIES
from radixlm.cache.manager import RadixManager
from radixlm.cache.nocache import NoCache
from radixlm.cache.ports import Lease

NAMESPACES = ("", "a", "b")


class Held:
    """One open lease as its sequence sees it."""

    def __init__(self, lease: Lease, tokens: Ints) -> None:
        self.lease = lease
        self.tokens = tokens
        self.computed = lease.matched


class World:
    """A cache, the bytes behind it, and a model in plain sets and dictionaries.

    `memory[page]` is what a device would hold there: the whole prefix whose last page it is, or the lease that got the
    page and has not computed it. A cached page with other contents than the prefix it is found under is the one mistake
    a cache must never make, however it comes about.
    """

    def __init__(self, cache: RadixManager | NoCache) -> None:
        self.cache = cache
        self.size = cache.page_size
        self.held: list[Held] = []
        self.memory: list[object] = [None] * cache.pages
        self.owner: dict[int, Held] = {}  # pages of leases that are not published
        self.published: dict[str, set[bytes]] = {name: {b""} for name in NAMESPACES}
        self.reuses = isinstance(cache, RadixManager)

    # ---- the oracle

    def prefix(self, tokens: Ints, pages: int) -> bytes:
        return tokens[: pages * self.size].tobytes()

    def longest(self, tokens: Ints, namespace: str, prefixes: set[bytes]) -> int:
        pages = 0
        while (pages + 1) * self.size <= len(tokens) and self.prefix(tokens, pages + 1) in prefixes:
            pages += 1
        return pages * self.size

    def pinned(self, namespace: str) -> set[bytes]:
        return {
            self.prefix(h.tokens, i)
            for h in self.held
            if h.lease.namespace == namespace
            for i in range(h.lease.published // self.size + 1)
        }

    def check_match(self, tokens: Ints, namespace: str) -> int:
        found = self.cache.match(tokens, namespace)
        most = self.longest(tokens, namespace, self.published[namespace])
        if not self.reuses:
            assert found == 0
        elif self.cache.evicted_tokens == 0:
            assert found == most
        else:
            assert self.longest(tokens, namespace, self.pinned(namespace)) <= found <= most
        assert found % self.size == 0
        assert bool(found) is bool(self.cache.path(tokens, namespace))
        return found

    def check(self) -> None:
        self.cache.audit()
        counts = self.cache.counts()
        pinned: set[int] = set()
        for held in self.held:
            lease = held.lease
            pinned.update(lease.pages[: lease.published // self.size])
            for i in range(held.computed // self.size):
                assert self.memory[lease.pages[i]] == (lease.namespace, self.prefix(held.tokens, i + 1))
        assert counts["pinned"] == len(pinned) * self.size
        assert counts["leased"] == len(self.owner) * self.size
        assert counts["total"] == self.cache.pages * self.size == sum(counts.values()) - counts["total"]
        assert self.cache.headroom() == counts["free"] + counts["evictable"]
        assert not pinned & set(self.owner)

    # ---- the verbs

    def open(self, tokens: Ints, namespace: str, limit: int, priority: int) -> Held:
        found = self.check_match(tokens, namespace)
        lease = self.cache.open(tokens, namespace, limit, priority)
        assert lease.matched == lease.published == min(found, max(limit, 0) // self.size * self.size)
        assert len(lease.pages) * self.size == lease.matched
        held = Held(lease, tokens)
        self.held.append(held)
        return held

    def grow(self, held: Held, upto: int) -> bool:
        lease, before, counts = held.lease, list(held.lease.pages), self.cache.counts()
        missing = max(0, -(-upto // self.size) - len(before)) * self.size
        grown = self.cache.grow(lease, upto)
        assert grown is (missing <= counts["free"] + counts["evictable"])
        assert lease.pages[: len(before)] == before
        new = lease.pages[len(before) :]
        assert len(new) * self.size == (missing if grown else 0)
        if not grown:
            assert self.cache.counts() == counts
        for page in new:
            assert page not in self.owner
            self.owner[page] = held
            self.memory[page] = held  # whatever was cached there is overwritten
        return grown

    def compute(self, held: Held, upto: int) -> None:
        upto = min(upto, len(held.tokens), len(held.lease.pages) * self.size)
        for i in range(held.computed // self.size, upto // self.size):
            page = held.lease.pages[i]
            assert self.owner[page] is held
            self.memory[page] = (held.lease.namespace, self.prefix(held.tokens, i + 1))
        held.computed = max(held.computed, upto)

    def publish(self, held: Held, upto: int) -> None:
        lease, before = held.lease, list(held.lease.pages)
        start, free = lease.published, self.cache.counts()["free"]
        moved = self.cache.publish(lease, held.tokens[:upto], upto)
        if not self.reuses:
            assert moved == [] and lease.pages == before and lease.published == 0
            return
        stop = max(start, upto // self.size * self.size)
        assert lease.published == stop
        changed = [(i, page) for i, page in enumerate(lease.pages) if page != before[i]]
        assert moved == changed
        assert all(start <= i * self.size < stop for i, _ in moved)
        assert self.cache.counts()["free"] == free + len(moved) * self.size
        for i in range(start // self.size, stop // self.size):
            del self.owner[before[i]]
            self.published[lease.namespace].add(self.prefix(held.tokens, i + 1))

    def close(self, held: Held) -> None:
        own = held.lease.pages[held.lease.published // self.size :]
        free = self.cache.counts()["free"]
        self.cache.close(held.lease)
        self.held.remove(held)
        for page in own:
            del self.owner[page]
        assert self.cache.counts()["free"] == free + len(own) * self.size

    def reclaim(self, tokens: int) -> None:
        counts, evicted = self.cache.counts(), self.cache.evicted_tokens
        went = self.cache.reclaim(tokens)
        assert went == min(-(-tokens // self.size) * self.size, counts["evictable"])
        after = self.cache.counts()
        assert after == {**counts, "free": counts["free"] + went, "evictable": counts["evictable"] - went}
        assert self.cache.evicted_tokens == evicted + went

    def finish(self) -> None:
        """Headroom is what can really be had; then everything is given back, and nothing is missing."""
        promised = self.cache.headroom()
        greedy = self.open(np.empty(0, np.int32), "", 0, 0)
        assert not self.grow(greedy, promised + 1)
        assert self.grow(greedy, promised) and self.cache.headroom() == 0
        self.check()
        for held in list(self.held):
            self.close(held)
        self.cache.reclaim(self.cache.pages * self.size)
        self.check()
        counts = self.cache.counts()
        assert counts["free"] == counts["total"] and self.owner == {} and list(self.cache.nodes()) == []


class Driver:
    """Random operations on a `World`. Prompts grow from earlier prompts, so they share prefixes of all lengths."""

    def __init__(self, world: World, seed: int, reclaims: bool = True) -> None:
        self.world = world
        self.rng = random.Random(seed)
        self.reclaims = reclaims
        self.prompts: list[Ints] = [np.empty(0, np.int32)]
        self.matched = self.moved = self.refused = 0

    def prompt(self) -> Ints:
        rng, size = self.rng, self.world.size
        stem = rng.choice(self.prompts)
        stem = stem[: max(rng.randrange(len(stem) + 1), rng.randrange(len(stem) + 1))]
        if rng.random() < 0.8:
            stem = stem[: len(stem) // size * size]
        tail = [t for _ in range(rng.randrange(5)) for t in [rng.randrange(2)] * size]
        tail += [rng.randrange(3) for _ in range(rng.randrange(size))]
        tokens = np.concatenate([stem, np.array(tail, np.int32)])[: 14 * size]
        self.prompts.append(tokens)
        del self.prompts[1 : len(self.prompts) - 30]
        return tokens

    def namespace(self) -> str:
        return self.rng.choices(NAMESPACES, (8, 1, 1))[0]

    def step(self) -> None:
        rng, world = self.rng, self.world
        verb = rng.random()
        if not world.held or (verb < 0.2 and len(world.held) < 8):
            # A third are twins of a running one, opened before it has published all of its prompt.
            tokens = rng.choice(world.held).tokens if world.held and rng.random() < 0.33 else self.prompt()
            limit = rng.randrange(-1, len(tokens) + 2) if verb < 0.05 else len(tokens)
            held = world.open(tokens, self.namespace(), limit, rng.randrange(-2, 3))
            self.matched += held.lease.matched
            return
        held = rng.choice(world.held)
        if verb < 0.5:
            upto = rng.randrange(len(held.tokens) + 2 * world.size)
            self.refused += not world.grow(held, upto if verb < 0.3 else len(held.tokens))
        elif verb < 0.6:
            world.compute(held, rng.randrange(len(held.tokens) + 1))
        elif verb < 0.8:
            world.compute(held, len(held.tokens))
            self.moved -= world.cache.counts()["free"]
            world.publish(held, held.computed if verb < 0.75 else rng.randrange(held.computed + 1))
            self.moved += world.cache.counts()["free"]
        elif verb < 0.93:
            world.close(held)
        elif verb < 0.97:
            world.check_match(self.prompt(), self.namespace())
        elif self.reclaims:
            world.reclaim(rng.randrange(6 * world.size))

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
            self.world.check()


@pytest.mark.parametrize("size", [1, 16])
def test_ten_thousand_operations(size: int) -> None:
    world = World(RadixManager(30, size))
    driver = Driver(world, seed=size)
    driver.run(10_000)
    # The run means nothing unless prefixes were found, duplicates were replaced and pages ran out.
    assert driver.matched > 1000 * size and driver.moved > 200 * size and driver.refused > 100
    assert world.cache.evicted_tokens > 1000 * size
    world.finish()


@pytest.mark.parametrize("size", [1, 3, 16, 32])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_under_pressure(policy: str, size: int) -> None:
    world = World(RadixManager(25, size, policy))
    Driver(world, seed=size).run(1500)
    assert world.cache.evicted_tokens > 0
    world.finish()


@pytest.mark.parametrize("size", [1, 2, 16, 64])
def test_match_is_exact_while_nothing_is_evicted(size: int) -> None:
    """A pool that never runs out and no reclaim: `World.check_match` then asks for equality with the prefixes."""
    world = World(RadixManager(20_000, size))
    driver = Driver(world, seed=size, reclaims=False)
    driver.run(800)
    assert world.cache.evicted_tokens == 0 and driver.matched > 100 * size
    world.finish()


@pytest.mark.parametrize("size", [1, 16])
def test_without_a_tree(size: int) -> None:
    world = World(NoCache(30, size))
    Driver(world, seed=size).run(1500)
    world.finish()


def test_eviction_in_batches() -> None:
    """A pool large enough that growing evicts more than the one page it needs."""
    world = World(RadixManager(640, 1))
    rng = random.Random(3)
    for i in range(150):
        tokens = np.array([i % 40, *(rng.randrange(4) for _ in range(20))], np.int32)
        held = world.open(tokens, "", 20, 0)
        for upto in range(held.lease.matched, 22):
            assert world.grow(held, upto)
        world.compute(held, 21)
        world.publish(held, 21)
        world.close(held)
        world.check()
    assert world.cache.evicted_tokens > 640
    assert world.cache.evicted_tokens / world.cache.evictions > 4
    world.finish()


# ---- the same world, driven by hypothesis, which shrinks what it finds


class CacheMachine(RuleBasedStateMachine):
    @initialize(size=st.sampled_from([1, 2, 16]), pages=st.integers(1, 14), policy=st.sampled_from(sorted(POLICIES)))
    def start(self, size: int, pages: int, policy: str) -> None:
        self.world = World(RadixManager(pages, size, policy))

    def pick(self, index: int) -> Held:
        return self.world.held[index % len(self.world.held)]

    has_leases: Callable[..., Callable[..., object]] = precondition(lambda self: bool(self.world.held))

    @rule(
        letters=st.lists(st.integers(0, 1), max_size=6),
        odd=st.integers(0, 15),
        namespace=st.sampled_from(NAMESPACES[:2]),
        limit=st.integers(-1, 100),
        priority=st.integers(-1, 1),
    )
    def open(self, letters: list[int], odd: int, namespace: str, limit: int, priority: int) -> None:
        size = self.world.size
        tokens = np.array([t for letter in letters for t in [letter] * size] + [0] * (odd % size), np.int32)
        self.world.open(tokens, namespace, limit, priority)

    @has_leases
    @rule(index=st.integers(0, 20), upto=st.integers(0, 120))
    def grow(self, index: int, upto: int) -> None:
        held = self.pick(index)
        self.world.grow(held, min(upto, len(held.tokens) + 2 * self.world.size))

    @has_leases
    @rule(index=st.integers(0, 20), upto=st.integers(0, 120))
    def compute(self, index: int, upto: int) -> None:
        self.world.compute(self.pick(index), upto)

    @has_leases
    @rule(index=st.integers(0, 20), upto=st.integers(0, 120))
    def publish(self, index: int, upto: int) -> None:
        held = self.pick(index)
        self.world.publish(held, min(upto, held.computed))

    @has_leases
    @rule(index=st.integers(0, 20))
    def run_to_the_end(self, index: int) -> None:
        held = self.pick(index)
        if self.world.grow(held, len(held.tokens)):
            self.world.compute(held, len(held.tokens))
            self.world.publish(held, len(held.tokens))
        self.world.close(held)

    @has_leases
    @rule(index=st.integers(0, 20))
    def close(self, index: int) -> None:
        self.world.close(self.pick(index))

    @rule(tokens=st.integers(0, 120))
    def reclaim(self, tokens: int) -> None:
        self.world.reclaim(tokens)

    @invariant()
    def holds(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None, derandomize=True)
