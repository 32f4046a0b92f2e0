"""The cache's verbs on small trees whose every page is known."""

from collections.abc import Sequence

import numpy as np
import pytest

from radixlm.base.errors import Internal, StartupError
from radixlm.base.plan import Ints
from radixlm.cache.manager import RadixManager
from radixlm.cache.nocache import NoCache
from radixlm.cache.node import Node, common_pages, cut
from radixlm.cache.ports import Cache, Lease

SIZES = [1, 2, 16, 32, 64]


def ints(*values: int) -> Ints:
    return np.array(values, np.int32)


def blocks(size: int, *letters: int) -> Ints:
    """One page per letter; pages of different letters differ in their last token alone."""
    return np.array([t for letter in letters for t in [7] * (size - 1) + [letter]], np.int32)


def hold(cache: Cache, tokens: Ints, namespace: str = "", priority: int = 0, publish: bool = True) -> Lease:
    """A lease whose tokens are all computed, and published unless told otherwise."""
    lease = cache.open(tokens, namespace, len(tokens), priority)
    assert cache.grow(lease, len(tokens))
    if publish:
        cache.publish(lease, tokens, len(tokens))
    cache.audit()
    return lease


def keep(cache: Cache, tokens: Ints, namespace: str = "", priority: int = 0) -> list[int]:
    """Put tokens into the tree; their pages."""
    lease = hold(cache, tokens, namespace, priority)
    pages = lease.pages
    cache.close(lease)
    cache.audit()
    return pages


def runs(cache: RadixManager) -> list[int]:
    return sorted(view.tokens for view in cache.nodes())


# ---- matching


@pytest.mark.parametrize("size", SIZES)
def test_match_is_the_longest_common_prefix_in_whole_pages(size: int) -> None:
    cache = RadixManager(100, size)
    keep(cache, blocks(size, 1, 2, 3, 4))
    assert cache.match(blocks(size, 1, 2, 3, 4), "") == 4 * size
    assert cache.match(blocks(size, 1, 2, 3, 4, 5), "") == 4 * size
    assert cache.match(blocks(size, 1, 2, 9, 4), "") == 2 * size
    assert cache.match(blocks(size, 9, 2, 3, 4), "") == 0
    assert cache.match(blocks(size, 1, 2, 3)[: 3 * size - 1], "") == (3 * size - 1) // size * size
    assert cache.match(ints(), "") == 0
    assert runs(cache) == [4 * size]  # asking splits nothing


@pytest.mark.parametrize("size", SIZES)
def test_open_gives_the_pages_that_publish_left(size: int) -> None:
    cache = RadixManager(100, size)
    pages = keep(cache, blocks(size, 1, 2, 3, 4))
    lease = cache.open(blocks(size, 1, 2, 3, 9), "", 4 * size)
    assert lease.matched == lease.published == 3 * size
    assert lease.pages == pages[:3]
    assert runs(cache) == [size, 3 * size]
    cache.audit()


@pytest.mark.parametrize(
    ("limit", "matched"), [(-1, 0), (0, 0), (15, 0), (16, 16), (47, 32), (63, 48), (64, 64), (999, 64)]
)
def test_open_stays_within_its_limit(limit: int, matched: int) -> None:
    cache = RadixManager(100, 16)
    keep(cache, blocks(16, 1, 2, 3, 4))
    lease = cache.open(blocks(16, 1, 2, 3, 4), "", limit)
    assert lease.matched == matched and len(lease.pages) == matched // 16
    cache.audit()
    assert cache.counts()["pinned"] == matched


def test_match_touches_no_recency() -> None:
    cache = RadixManager(4, 1)
    keep(cache, ints(1, 2))
    keep(cache, ints(3, 4))
    cache.match(ints(1, 2), "")
    cache.path(ints(1, 2), "")
    cache.reclaim(2)
    assert cache.match(ints(3, 4), "") == 2 and cache.match(ints(1, 2), "") == 0


def test_path_names_the_nodes_that_match_walks() -> None:
    cache = RadixManager(100, 1)
    keep(cache, ints(1, 2, 3, 4))
    keep(cache, ints(1, 2, 5, 6))
    keep(cache, ints(1, 2), "other")
    a, b = cache.path(ints(1, 2, 3, 4), ""), cache.path(ints(1, 2, 5, 9), "")
    assert len(a) == len(b) == 2 and a[0] == b[0] and a[1] != b[1]
    assert cache.path(ints(1, 9), "") == a[:1]  # part of a run counts
    assert cache.path(ints(9), "") == cache.path(ints(1), "nobody") == ()
    assert not set(cache.path(ints(1, 2), "other")) & {*a, *b}


def test_wrong_width_of_tokens_is_refused() -> None:
    cache = RadixManager(8, 2)
    wide = np.array([1, 2], np.int64)
    for verb in (lambda: cache.match(wide, ""), lambda: cache.open(wide, "", 2), lambda: cache.path(wide, "")):  # type: ignore[arg-type]
        with pytest.raises(Internal, match="int32"):
            verb()
    cache.audit()


def test_what_the_caller_does_with_its_array_later_does_not_matter() -> None:
    cache = RadixManager(8, 2)
    tokens = ints(1, 2, 3, 4)
    keep(cache, tokens)
    tokens[:] = 9
    cache.audit()
    assert cache.match(ints(1, 2, 3, 4), "") == 4


# ---- namespaces


@pytest.mark.parametrize("size", [1, 16])
def test_namespaces_never_share(size: int) -> None:
    cache = RadixManager(100, size)
    tokens = blocks(size, 1, 2, 3)
    names = ["", "a", "b", "a\x00b", "\u00e9"]
    held = {name: hold(cache, tokens, name) for name in names}
    pages = [page for lease in held.values() for page in lease.pages]
    assert len(set(pages)) == len(pages) == 15
    for lease in held.values():
        cache.close(lease)
    for name in names:
        again = cache.open(tokens, name, len(tokens))
        assert again.matched == len(tokens)
        cache.close(again)
    assert cache.match(tokens, "c") == 0
    cache.audit()


def test_namespaces_that_nobody_needs_leave_no_trace() -> None:
    cache = RadixManager(10, 1)
    for i in range(50):
        cache.close(cache.open(ints(1, 2), f"tenant {i}", 2))
        keep(cache, ints(1, 2), f"tenant {i}")
    assert len(cache._tree.roots) == 5
    cache.reclaim(100)
    assert cache._tree.roots == {}
    cache.audit()


# ---- publishing


@pytest.mark.parametrize("size", SIZES)
def test_publish_takes_whole_pages_only(size: int) -> None:
    cache = RadixManager(100, size)
    tokens = blocks(size, 1, 2, 3)[: 3 * size - size // 2]
    lease = hold(cache, tokens)
    assert lease.published == len(tokens) // size * size
    assert cache.match(tokens, "") == lease.published
    assert cache.counts()["leased"] == (0 if size == 1 else size)
    cache.close(lease)
    assert cache.counts()["leased"] == 0
    cache.audit()


def test_publish_in_parts_equals_publish_at_once() -> None:
    cache = RadixManager(100, 4)
    tokens = np.arange(40, dtype=np.int32)
    lease = cache.open(tokens, "", 39)
    for upto in (3, 4, 9, 9, 22, 21, 40):
        assert cache.grow(lease, upto)
        assert cache.publish(lease, tokens, upto) == []
        cache.audit()
    assert lease.published == 40
    assert cache.open(tokens, "", 40).pages == lease.pages


@pytest.mark.parametrize("size", SIZES)
def test_the_second_of_two_twins_adopts_the_first_ones_pages(size: int) -> None:
    cache = RadixManager(100, size)
    tokens = blocks(size, 1, 2, 3)
    first, second = (hold(cache, tokens, publish=False) for _ in range(2))
    assert not set(first.pages) & set(second.pages)
    free = cache.counts()["free"]
    assert cache.publish(first, tokens, len(tokens)) == []
    moved = cache.publish(second, tokens, len(tokens))
    assert moved == list(enumerate(first.pages))
    assert second.pages == first.pages
    assert cache.counts()["free"] == free + 3 * size
    cache.audit()
    cache.close(first)
    assert cache.counts()["pinned"] == 3 * size
    cache.close(second)
    assert cache.counts()["evictable"] == 3 * size
    cache.audit()


@pytest.mark.parametrize("size", SIZES)
def test_partial_overlap_remaps_what_is_shared_and_keeps_the_rest(size: int) -> None:
    cache = RadixManager(100, size)
    a, b = blocks(size, 1, 2, 3, 4), blocks(size, 1, 2, 8, 9)
    first, second = hold(cache, a, publish=False), hold(cache, b, publish=False)
    own = list(second.pages)
    cache.publish(first, a, len(a))
    assert cache.publish(second, b, len(b)) == [(0, first.pages[0]), (1, first.pages[1])]
    assert second.pages == first.pages[:2] + own[2:]
    assert runs(cache) == [2 * size] * 3
    cache.audit()


def test_overlap_with_a_tree_of_several_levels() -> None:
    """The newcomer's prefix is pinned, its middle lies in two other runs, its end is new."""
    cache = RadixManager(100, 2)
    root, long = blocks(2, 1, 2), blocks(2, 1, 2, 3, 4, 5, 6, 7)
    keep(cache, root)
    lease = cache.open(long, "", 4)
    assert lease.matched == 4 and cache.grow(lease, 14)
    own = list(lease.pages)
    other = keep(cache, blocks(2, 1, 2, 3, 4, 5, 6, 9, 9))
    keep(cache, blocks(2, 1, 2, 3, 8))
    assert cache.publish(lease, long, 11) == [(2, other[2]), (3, other[3]), (4, other[4])]
    assert lease.published == 10
    assert lease.pages == own[:2] + other[2:5] + own[5:]
    cache.audit()
    assert cache.publish(lease, long, 14) == [(5, other[5])]
    assert lease.pages == own[:2] + other[2:6] + own[6:]
    cache.audit()
    cache.close(lease)
    assert cache.match(long, "") == 14
    assert cache.counts() == {"free": 2 * 90, "leased": 0, "pinned": 0, "evictable": 20, "total": 200}


def test_remaps_leave_pages_that_were_always_canonical_alone() -> None:
    cache = RadixManager(100, 1)
    tokens = ints(1, 2, 3, 4, 5)
    keep(cache, tokens[:2])
    a, b = cache.open(tokens, "", 4), cache.open(tokens, "", 4)
    for lease in (a, b):
        cache.grow(lease, 5)
    cache.publish(a, tokens, 5)
    assert [index for index, _ in cache.publish(b, tokens, 5)] == [2, 3, 4]
    assert b.pages == a.pages and a.matched == b.matched == 2


def test_publish_of_what_does_not_exist_is_refused_and_changes_nothing() -> None:
    cache = RadixManager(100, 2)
    lease = cache.open(ints(1, 2, 3, 4, 5, 6), "", 5)
    cache.grow(lease, 4)
    for tokens, upto in ((ints(1, 2, 3, 4, 5, 6), 6), (ints(1, 2), 4)):
        with pytest.raises(Internal):
            cache.publish(lease, tokens, upto)
        cache.audit()
    assert lease.published == 0 and len(list(cache.nodes())) == 0


# ---- pins and pressure


@pytest.mark.parametrize("size", [1, 16])
def test_pinned_prefixes_survive_any_pressure(size: int) -> None:
    cache = RadixManager(12, size)
    tokens = blocks(size, 1, 2, 3, 4)
    keep(cache, tokens)
    keep(cache, blocks(size, 1, 2, 5))
    held = cache.open(tokens, "", 3 * size)
    pages = list(held.pages)
    assert cache.reclaim(10**6) == 2 * size
    hungry = cache.open(ints(), "", 0)
    assert cache.grow(hungry, 9 * size)
    assert not cache.grow(hungry, 9 * size + 1)
    assert cache.reclaim(10**6) == 0
    cache.audit()
    assert held.pages == pages
    assert cache.match(tokens, "") == 3 * size
    assert not set(hungry.pages) & set(pages)


def test_grow_that_cannot_be_met_evicts_nothing() -> None:
    cache = RadixManager(10, 1)
    keep(cache, ints(1, 2, 3, 4))
    lease = cache.open(ints(), "", 0)
    before = cache.counts()
    assert not cache.grow(lease, 11)
    assert cache.counts() == before and lease.pages == [] and cache.evicted_tokens == 0
    assert cache.grow(lease, 10)
    assert len(lease.pages) == 10
    cache.audit()


def test_grow_cuts_a_long_run_from_its_end() -> None:
    cache = RadixManager(100, 1)
    keep(cache, np.arange(100, dtype=np.int32))
    lease = cache.open(ints(), "", 0)
    assert cache.grow(lease, 10)
    assert cache.match(np.arange(100, dtype=np.int32), "") == 90
    assert (cache.evicted_tokens, cache.evictions) == (10, 1)
    cache.audit()


def test_grow_to_a_length_that_exists_takes_nothing() -> None:
    cache = RadixManager(10, 4)
    lease = cache.open(ints(), "", 0)
    for upto, pages in ((0, 0), (1, 1), (4, 1), (3, 1), (5, 2), (8, 2), (0, 2)):
        assert cache.grow(lease, upto)
        assert len(lease.pages) == pages
    assert cache.counts()["leased"] == 8


@pytest.mark.parametrize("size", [1, 16])
def test_headroom_is_what_can_really_be_had(size: int) -> None:
    cache = RadixManager(40, size)
    for letters in ([1, 2, 3], [1, 2, 4, 5], [6, 7], [6, 7, 8]):
        keep(cache, blocks(size, *letters))
    held = cache.open(blocks(size, 1, 2, 4), "", 3 * size)
    cache.grow(held, 5 * size)
    promised = cache.headroom()
    assert promised == (40 - 3 - 2) * size
    lease = cache.open(ints(), "", 0)
    assert not cache.grow(lease, promised + 1)
    assert cache.grow(lease, promised) and cache.headroom() == 0
    cache.audit()
    cache.close(lease)
    assert cache.headroom() == promised == cache.counts()["free"]


def test_flush_leaves_only_what_is_held() -> None:
    cache = RadixManager(100, 1)
    for i in range(20):
        keep(cache, ints(1, 2, i + 10, 4), f"{i % 3}")
    held = cache.open(ints(1, 2, 10, 4), "0", 3)
    assert cache.reclaim(10**9) == sum((1 + 1 + 2 * 7, 2 + 2 * 7, 2 + 2 * 6)) - 3
    cache.audit()
    assert cache.counts() == {"free": 97, "leased": 0, "pinned": 3, "evictable": 0, "total": 100}
    cache.close(held)
    assert cache.reclaim(10**9) == 3 and cache.reclaim(1) == 0
    assert list(cache.nodes()) == [] and cache.counts()["free"] == 100
    cache.audit()


@pytest.mark.parametrize(("asked", "went"), [(0, 0), (1, 4), (4, 4), (5, 8), (40, 40), (41, 40), (-3, 0)])
def test_reclaim_rounds_up_to_pages(asked: int, went: int) -> None:
    cache = RadixManager(20, 4)
    keep(cache, np.arange(40, dtype=np.int32))
    assert cache.reclaim(asked) == went
    cache.audit()


# ---- leases


@pytest.mark.parametrize("make", [lambda: RadixManager(8, 2), lambda: NoCache(8, 2)])
def test_a_closed_lease_is_of_no_use(make: object) -> None:
    cache: Cache = make()  # type: ignore[operator]
    lease = hold(cache, ints(1, 2, 3))
    cache.close(lease)
    counts = cache.counts()
    with pytest.raises(Internal, match="twice"):
        cache.close(lease)
    with pytest.raises(Internal, match="closed"):
        cache.grow(lease, 2)
    with pytest.raises(Internal, match="closed"):
        cache.publish(lease, ints(1, 2, 3), 2)
    assert cache.counts() == counts
    cache.audit()


def test_a_list_of_pages_taken_before_close_stays_as_it_was() -> None:
    cache = RadixManager(8, 1)
    lease = hold(cache, ints(1, 2))
    pages = lease.pages
    cache.close(lease)
    assert pages == [0, 1] and lease.pages == []


def test_undone_admission_does_not_count_as_use() -> None:
    cache = RadixManager(8, 1, "lfu")
    keep(cache, ints(1, 2))
    queries, hits = cache.query_tokens, cache.hit_tokens
    for _ in range(5):
        cache.close(cache.open(ints(1, 2, 3), "", 2))
    assert (cache.query_tokens, cache.hit_tokens) == (queries, hits)
    assert [view.hits for view in cache.nodes()] == [1]


def test_counters_for_metrics() -> None:
    cache = RadixManager(8, 1)
    keep(cache, ints(1, 2, 3))
    assert (cache.query_tokens, cache.hit_tokens) == (3, 0)
    lease = cache.open(ints(1, 2, 3, 4, 5), "", 4)
    cache.grow(lease, 4)
    cache.grow(lease, 5)
    assert (cache.query_tokens, cache.hit_tokens) == (8, 3)
    cache.close(lease)
    assert cache.reclaim(2) == 2
    assert (cache.evicted_tokens, cache.evictions) == (2, 1)


# ---- shapes


def test_trees_may_be_deep() -> None:
    depth = 5000
    cache = RadixManager(depth, 1)
    tokens = np.arange(depth, dtype=np.int32)
    lease = cache.open(tokens, "", 0)
    for upto in range(1, depth + 1):
        cache.grow(lease, upto)
        cache.publish(lease, tokens, upto)
    assert len(list(cache.nodes())) == depth
    cache.close(lease)
    again = cache.open(tokens, "", depth)
    assert again.matched == depth
    cache.audit()
    cache.close(again)
    assert cache.reclaim(depth) == depth
    cache.audit()


def test_nodes_picture() -> None:
    cache = RadixManager(100, 1)
    keep(cache, ints(1, 2, 3))
    keep(cache, ints(1, 2, 4, 5))
    keep(cache, ints(9), "tenant")
    lease = cache.open(ints(1, 2, 3), "", 3)
    views = {view.id: view for view in cache.nodes()}
    assert {(v.namespace, v.tokens, v.pins, v.hits) for v in views.values()} == {
        ("", 2, 1, 2), ("", 1, 1, 1), ("", 2, 0, 1), ("tenant", 1, 0, 1),
    }  # fmt: skip
    top = {v.id for v in views.values() if v.parent == -1}
    assert len(top) == 2
    assert all(v.parent in views for v in views.values() if v.id not in top)
    ages = sorted((v.age, v.tokens) for v in views.values())
    assert ages[0][0] == ages[1][0] == 0 and ages[-1][0] > ages[-2][0] > 0  # held now; the tenant's; the oldest
    cache.close(lease)


def test_common_pages_and_cut() -> None:
    run = np.arange(10, dtype=np.int32)
    for size, start, stop, expected in ((1, 0, 10, 10), (2, 0, 10, 5), (2, 0, 7, 3), (1, 3, 10, 0), (5, 0, 4, 0)):
        assert common_pages(run, np.arange(10, dtype=np.int32), start, stop, size) == expected
    odd = run.copy()
    odd[7] = 99
    assert common_pages(run, odd, 0, 10, 2) == 3 and common_pages(run, odd, 0, 10, 1) == 7
    big = np.arange(1000, dtype=np.int32)
    part = big
    while len(part) > 10:  # cut bit by bit, as eviction does
        part = cut(part, 0, len(part) - 10)
        base = part if part.base is None else part.base
        assert len(base) <= 2 * len(part)
    assert part.tolist() == list(range(10))


def test_split_keeps_no_more_memory_than_it_needs() -> None:
    cache = RadixManager(1000, 1)
    keep(cache, np.arange(1000, dtype=np.int32))
    lease = cache.open(np.arange(10, dtype=np.int32), "", 10)
    cache.reclaim(1000)
    for _, node in cache._tree.walk():
        for array in (node.tokens, node.pages):
            assert array.base is None or len(array.base) <= 2 * len(array)
    cache.close(lease)


def test_what_was_evicted_keeps_no_memory() -> None:
    """Withdrawn entries stay in the eviction queue for a while, and must not hold on to the runs of their nodes."""
    cache = RadixManager(200, 1)
    for i in range(20):
        keep(cache, ints(i, 1, 2, 3))
        cache.close(cache.open(ints(i, 1, 2, 3), "", 4))  # leaves a withdrawn entry behind, and pushes another
    cache.reclaim(40)
    entries = [node for _, _, node in cache._tree.queue._heap]
    assert len(entries) > cache._tree.queue.count == 10
    assert all((len(node.tokens), len(node.pages)) == ((0, 0) if node.parent is None else (4, 4)) for node in entries)


# ---- without a tree


@pytest.mark.parametrize("size", [1, 16])
def test_nocache_never_matches_and_leaks_nothing(size: int) -> None:
    cache = NoCache(10, size)
    tokens = blocks(size, 1, 2, 3)
    for _ in range(5):
        lease = hold(cache, tokens)
        assert lease.matched == lease.published == 0 and len(lease.pages) == 3
        assert cache.match(tokens, "") == 0 and cache.path(tokens, "") == ()
        assert cache.counts() == {
            "free": 7 * size, "leased": 3 * size, "pinned": 0, "evictable": 0, "total": 10 * size,
        }  # fmt: skip
        assert cache.headroom() == 7 * size and cache.reclaim(10**6) == 0
        assert not cache.grow(lease, 11 * size)
        assert cache.grow(lease, 4 * size) and len(lease.pages) == 4
        cache.close(lease)
        cache.audit()
        assert cache.headroom() == 10 * size
    assert (cache.hit_tokens, cache.query_tokens, list(cache.nodes())) == (0, 15 * size, [])


def test_both_caches_keep_the_protocol() -> None:
    caches: Sequence[Cache] = (RadixManager(4, 2), NoCache(4, 2))
    assert [(c.page_size, c.pages) for c in caches] == [(2, 4), (2, 4)]


@pytest.mark.parametrize("make", [RadixManager, NoCache])
def test_impossible_sizes_are_refused(make: type[RadixManager] | type[NoCache]) -> None:
    with pytest.raises(StartupError):
        make(0, 1)
    with pytest.raises(StartupError):
        make(4, 0)


# ---- the audit itself


def _lose_a_page(cache: RadixManager, node: Node, lease: Lease) -> None:
    cache._free.take_one()


def _share_a_page(cache: RadixManager, node: Node, lease: Lease) -> None:
    lease.pages[-1] = lease.pages[-2] = cache._free.take_one()


def _free_a_held_page(cache: RadixManager, node: Node, lease: Lease) -> None:
    cache._free.give(lease.pages[-1:])


def _count_a_pin_twice(cache: RadixManager, node: Node, lease: Lease) -> None:
    node.refs += 1


def _miscount_evictable(cache: RadixManager, node: Node, lease: Lease) -> None:
    cache._tree.evictable += 1


def _change_a_first_token(cache: RadixManager, node: Node, lease: Lease) -> None:
    node.tokens[0] += 1


def _file_under_another_key(cache: RadixManager, node: Node, lease: Lease) -> None:
    assert node.parent is not None
    node.parent.children[12345] = node.parent.children.pop(node.key)


def _swap_the_leases_pages(cache: RadixManager, node: Node, lease: Lease) -> None:
    lease.pages[0], lease.pages[1] = lease.pages[1], lease.pages[0]


def _forget_a_leaf(cache: RadixManager, node: Node, lease: Lease) -> None:
    first = cache._tree.queue.first()
    assert first is not None
    cache._tree.queue.withdraw(first)


def _change_a_queued_key(cache: RadixManager, node: Node, lease: Lease) -> None:
    first = cache._tree.queue.first()
    assert first is not None
    first.last += 1


def _drop_a_lease(cache: RadixManager, node: Node, lease: Lease) -> None:
    del cache._leases[lease]


def _raise_a_priority(cache: RadixManager, node: Node, lease: Lease) -> None:
    leaf = cache._tree.queue.first()
    assert leaf is not None
    leaf.priority = 99


def _shift_the_published_mark(cache: RadixManager, node: Node, lease: Lease) -> None:
    lease.published -= 1


@pytest.mark.parametrize(
    "damage",
    [
        _lose_a_page, _share_a_page, _free_a_held_page, _count_a_pin_twice, _miscount_evictable, _change_a_first_token,
        _file_under_another_key, _swap_the_leases_pages, _forget_a_leaf, _change_a_queued_key, _drop_a_lease,
        _raise_a_priority, _shift_the_published_mark,
    ],
)  # fmt: skip
def test_audit_finds_each_kind_of_damage(damage: object) -> None:
    cache = RadixManager(40, 1)
    keep(cache, ints(1, 2, 3, 4))
    keep(cache, ints(1, 2, 5, 6))
    lease = cache.open(ints(1, 2, 3, 9), "", 3)
    cache.grow(lease, 8)
    cache.audit()
    damage(cache, lease.node, lease)  # type: ignore[operator]
    with pytest.raises(AssertionError):
        cache.audit()
