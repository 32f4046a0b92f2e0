"""Which prefix goes first, exactly, under each policy; and that the queue stays small and honest."""

import random
from collections.abc import Iterator

import numpy as np
import pytest

from radixlm.base.errors import StartupError
from radixlm.base.plan import NO_INTS, Ints
from radixlm.cache.eviction import POLICIES, EvictionQueue, policy_named
from radixlm.cache.manager import RadixManager
from radixlm.cache.node import Node


def ints(*values: int) -> Ints:
    return np.array(values, np.int32)


def use(cache: RadixManager, tokens: Ints, priority: int = 0) -> None:
    """Compute and publish tokens, with one more page of the lease's own: a use, even when all is cached."""
    lease = cache.open(tokens, "", len(tokens), priority)
    assert cache.grow(lease, len(tokens) + cache.page_size)
    cache.publish(lease, tokens, len(tokens))
    cache.close(lease)


def order(cache: RadixManager, names: dict[str, Ints]) -> str:
    """Evict page by page; the names in the order in which their last token goes."""
    gone = ""
    while cache.reclaim(1):
        cache.audit()
        for name, tokens in names.items():
            if name not in gone and cache.match(tokens, "") < len(tokens):
                gone += name
    return gone


NAMES = {"a": ints(1, 1), "b": ints(2, 2), "c": ints(3, 3), "d": ints(4, 4)}


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("lru", "bdac"),  # last used in the order b, d, a, c
        ("mru", "cadb"),
        ("fifo", "abcd"),
        ("lfu", "dbca"),  # d was used once, b and c twice (b longer ago), a three times
        ("slru", "dbac"),  # d was used once; of the rest b, a, c by last use
        ("priority", "dbac"),  # d has 0, b and a have 1 (b used longer ago), c has 5
    ],
)
def test_exact_order(policy: str, expected: str) -> None:
    cache = RadixManager(30, 1, policy)
    priorities = {"a": 1, "b": 1, "c": 5, "d": 0}
    for name in "abcbadac":
        use(cache, NAMES[name], priorities[name])
    assert order(cache, NAMES) == expected


def test_lru_counts_the_end_of_a_lease_as_use() -> None:
    cache = RadixManager(30, 1)
    use(cache, NAMES["a"])
    long = cache.open(NAMES["a"], "", 2)
    use(cache, NAMES["b"])
    cache.close(long)
    assert order(cache, {"a": NAMES["a"], "b": NAMES["b"]}) == "ba"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prefix_outlives_what_was_built_on_it(policy: str) -> None:
    cache = RadixManager(60, 1, policy)
    stem, twigs = ints(1, 2, 3), [ints(1, 2, 3, 10 + i, 0) for i in range(5)]
    use(cache, stem, priority=-1)
    for twig in twigs:
        use(cache, twig, priority=1)
    for left in range(5, 0, -1):
        assert cache.match(stem, "") == 3
        assert sum(cache.match(twig, "") == 5 for twig in twigs) == left
        assert cache.reclaim(2) == 2
        cache.audit()
    assert [view.tokens for view in cache.nodes()] == [3]
    assert cache.reclaim(3) == 3


def test_a_run_is_used_up_before_the_next_is_touched() -> None:
    cache = RadixManager(30, 1)
    names = {"a": ints(1, 1, 1, 1), "b": ints(2, 2, 2, 2)}
    for tokens in names.values():
        use(cache, tokens)
    left = []
    while cache.reclaim(1):
        left.append(tuple(cache.match(tokens, "") for tokens in names.values()))
    assert left == [(3, 4), (2, 4), (1, 4), (0, 4), (0, 3), (0, 2), (0, 1), (0, 0)]
    assert cache.evictions == 8


def test_priority_of_a_shared_prefix_is_the_highest_of_its_users() -> None:
    cache = RadixManager(30, 1, "priority")
    use(cache, ints(1, 2, 3), priority=0)
    use(cache, ints(1, 2, 9), priority=7)
    use(cache, ints(5, 6), priority=3)
    assert order(cache, {"x": ints(1, 2, 3), "y": ints(1, 2, 9), "z": ints(5, 6), "s": ints(1, 2)}) == "xzys"


def test_negative_priority_goes_before_none() -> None:
    cache = RadixManager(30, 1, "priority")
    use(cache, NAMES["b"], priority=0)
    use(cache, NAMES["a"], priority=-5)
    use(cache, NAMES["c"], priority=-5)
    use(cache, NAMES["c"], priority=2)
    assert order(cache, {n: NAMES[n] for n in "abc"}) == "abc"


def test_slru_keeps_shared_prefixes_through_a_burst_of_strangers() -> None:
    for policy, survives in (("slru", True), ("lru", False)):
        cache = RadixManager(40, 1, policy)
        shared = ints(1, 2, 3, 4)
        use(cache, shared)
        use(cache, shared)
        for i in range(100):
            use(cache, np.arange(1000 + 10 * i, 1008 + 10 * i, dtype=np.int32))
        assert (cache.match(shared, "") == 4) is survives


def test_mru_keeps_part_of_a_loop_that_does_not_fit() -> None:
    """Ten prompts in turn over a pool that holds eight of them: lru never hits, mru does."""
    hits = {}
    for policy in ("lru", "mru"):
        cache = RadixManager(8 * 8 + 1, 1, policy)
        for _ in range(20):
            for i in range(10):
                use(cache, np.arange(100 * i, 100 * i + 8, dtype=np.int32))
        hits[policy] = cache.hit_tokens
    assert hits["lru"] == 0 and hits["mru"] > 20 * 10 * 8 / 2


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("fifo", "axby"), ("lru", "abyx"), ("lfu", "byax"), ("slru", "byax"), ("priority", "byax")],
)
def test_both_parts_of_a_split_run_keep_its_history(policy: str, expected: str) -> None:
    """x is the first half of a, y that of b. a is used twice, b once; then both are split by a lease without use."""
    cache = RadixManager(30, 1, policy)
    names = {"a": ints(1, 1, 1, 1), "b": ints(2, 2, 2, 2), "x": ints(1, 1), "y": ints(2, 2)}
    use(cache, names["a"], priority=3)
    use(cache, names["a"], priority=3)
    use(cache, names["b"], priority=2)
    cache.close(cache.open(names["y"], "", 2))
    cache.close(cache.open(names["x"], "", 2))
    assert order(cache, names) == expected


def test_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(StartupError, match=r"'best'.*lru, lfu, fifo, mru, slru, priority"):
        policy_named("best")
    with pytest.raises(StartupError):
        RadixManager(4, 1, "LRU")


# ---- the queue


def leaves(count: int) -> Iterator[Node]:
    for i in range(count):
        yield Node(i, i, None, NO_INTS, NO_INTS, i, 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_queue_agrees_with_sorting(policy: str) -> None:
    """Nodes leave, change and come back at random; what remains comes out in the order of a plain sort."""
    rng = random.Random(5)
    queue = EvictionQueue(POLICIES[policy])
    nodes = list(leaves(200))
    inside: set[Node] = set()
    for tick in range(5000):
        node = rng.choice(nodes)
        if node in inside:
            queue.withdraw(node)
            inside.remove(node)
        else:
            node.last, node.hits, node.priority = tick + 1000, node.hits + rng.randrange(3), rng.randrange(4)
            queue.push(node)
            inside.add(node)
        if tick % 50 == 0:
            queue.check(inside)
            first = queue.first()
            assert first is min(inside, key=POLICIES[policy])
    out = []
    while (first := queue.first()) is not None:
        queue.withdraw(first)
        out.append(first)
    assert out == sorted(inside, key=POLICIES[policy])


def test_queue_stays_small_however_often_leaves_come_and_go() -> None:
    queue = EvictionQueue(POLICIES["lru"])
    nodes = list(leaves(10))
    for node in nodes:
        queue.push(node)
    for tick in range(10_000):
        node = nodes[tick % 10]
        queue.withdraw(node)
        node.last = tick
        queue.push(node)
        assert len(queue._heap) <= 2 * queue.count + queue.SLACK
    queue.check(set(nodes))
    for node in nodes:
        queue.withdraw(node)
        queue.withdraw(node)  # harmless
    assert queue.count == 0 and queue.first() is None


def test_eviction_looks_at_no_other_leaf() -> None:
    """A leaf's key is computed once, when its last lease leaves it, and none while the tree is evicted leaf by leaf."""
    calls = 0

    def counted(node: Node) -> tuple[int, ...]:
        nonlocal calls
        calls += 1
        return (node.last,)

    cache = RadixManager(4000, 1)
    cache._tree.queue = EvictionQueue(counted)
    for i in range(2000):
        lease = cache.open(ints(i, 0), "", 0)
        cache.grow(lease, 2)
        cache.publish(lease, ints(i, 0), 2)
        cache.close(lease)
    assert calls == 2000
    for _ in range(2000):
        cache.reclaim(2)
    assert calls == 2000 and cache.counts()["free"] == 4000
