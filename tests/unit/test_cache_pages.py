"""The free list: ascending runs, no page twice, nothing lost."""

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixlm.base.errors import Internal, StartupError
from radixlm.cache.pages import FreePages


def is_run(pages: list[int]) -> bool:
    return pages == list(range(pages[0], pages[0] + len(pages)))


@pytest.mark.parametrize("sizes", [[1] * 20, [20], [3, 1, 5, 1, 10], [64, 1, 63, 64], [200, 1, 1, 300]])
def test_fresh_pool_hands_out_each_request_as_one_run(sizes: list[int]) -> None:
    free = FreePages(1000)
    handed: list[int] = []
    for size in sizes:
        pages = free.take(size)
        assert is_run(pages)
        handed += pages
    assert len(set(handed)) == sum(sizes) == 1000 - free.count


def test_fresh_pool_starts_at_zero_and_goes_up() -> None:
    free = FreePages(300)
    assert [free.take_one() for _ in range(3)] == [0, 1, 2]
    assert free.take(4) == [3, 4, 5, 6]
    assert FreePages(300).take(300) == list(range(300))


def test_all_types_are_plain_integers() -> None:
    free = FreePages(300)
    for page in (free.take_one(), *free.take(2), *free.take(100)):
        assert type(page) is int


def test_runs_form_again_after_churn() -> None:
    free = FreePages(1000)
    pages = free.take(1000)
    random.Random(1).shuffle(pages)
    while pages:
        free.give(pages[:7])
        del pages[:7]
    assert free.take(1000) == list(range(1000))


def test_large_request_finds_a_run_beyond_scattered_pages() -> None:
    free = FreePages(1000)
    free.take(1000)
    free.give(list(range(0, 400, 2)))  # two hundred single pages, then one run of 150
    free.give(list(range(600, 750)))
    assert free.take(120) == list(range(600, 720))
    free.listed()
    assert free.take(120) == list(range(0, 240, 2))  # there is no run of 120 left: the lowest
    assert free.take(110) == [*range(240, 400, 2), *range(720, 750)]
    assert free.count == 0
    free.listed()


def test_run_at_the_very_end_of_the_search_is_found() -> None:
    free = FreePages(20_000)
    free.take(20_000)
    free.give(list(range(0, 1000, 2)))
    free.give(list(range(19_900, 20_000)))
    assert free.take(100) == list(range(19_900, 20_000))


@pytest.mark.parametrize("taken", [1, 64, 65, 300])
def test_double_free_is_refused_and_changes_nothing(taken: int) -> None:
    free = FreePages(400)
    pages = free.take(taken)
    free.give(pages[:1])
    count = free.count
    for bad in (pages[:1], pages, [399], [pages[-1], pages[-1]] if taken > 1 else [0, 0], [-1], [400]):
        with pytest.raises(Internal):
            free.give(bad)
        assert free.count == count
        free.listed()
    free.give(pages[1:])
    assert free.count == 400


def test_a_page_below_zero_is_not_the_last_one() -> None:
    free = FreePages(10)
    free.take(10)
    with pytest.raises(Internal, match="exist"):
        free.give([-1])
    assert free.count == 0


@pytest.mark.parametrize("seed", range(4))
def test_fragmented_pool_under_large_and_small_requests(seed: int) -> None:
    rng = random.Random(seed)
    free, available, out = FreePages(3000), set(range(3000)), []
    runs = 0
    for _ in range(400):
        size = rng.choice([1, 2, 30, 70, 150, 400])
        if size <= len(available) and rng.random() < 0.5:
            pages = free.take(size)
            assert len(pages) == size and set(pages) <= available
            assert all(a < b for a, b in pairwise(pages))
            available -= set(pages)
            out.append(pages)
            runs += size > 64 and is_run(pages)
        elif out:
            pages = out.pop(rng.randrange(len(out)))
            back = pages if rng.random() < 0.5 else pages[:: rng.randrange(2, 5)]
            if len(back) < len(pages):
                out.append([page for page in pages if page not in set(back)])
            free.give(back)
            available |= set(back)
        assert set(free.listed().tolist()) == available
    assert runs > 20


def test_giving_nothing_and_taking_nothing() -> None:
    free = FreePages(4)
    free.give([])
    free.give(np.empty(0, np.int32))
    assert free.take(0) == [] and free.count == 4


@pytest.mark.parametrize("count", [11, 65, 100])
def test_taking_more_than_is_free_is_refused_and_changes_nothing(count: int) -> None:
    free = FreePages(100)
    held = free.take(90)
    with pytest.raises(Internal):
        free.take(count)
    assert free.take(10) == list(range(90, 100))
    with pytest.raises(Internal):
        free.take_one()
    free.give(held)
    assert free.count == 90
    free.listed()


def test_pool_without_pages_is_refused() -> None:
    with pytest.raises(StartupError, match="0 pages"):
        FreePages(0)


def test_listed_notices_a_lost_page_and_a_false_flag() -> None:
    lost = FreePages(10)
    lost.take_one()
    lost._head.pop()
    with pytest.raises(AssertionError):
        lost.listed()
    flagged = FreePages(10)
    flagged._flags[3] = 1
    with pytest.raises(AssertionError):
        flagged.listed()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    total=st.integers(1, 400),
    steps=st.lists(
        st.tuples(st.sampled_from(["one", "take", "give"]), st.integers(0, 200), st.integers(0, 10**6)), max_size=60
    ),
)
def test_against_a_set(total: int, steps: list[tuple[str, int, int]]) -> None:
    free = FreePages(total)
    available = set(range(total))
    out: list[int] = []
    for verb, count, seed in steps:
        if verb == "give":
            random.Random(seed).shuffle(out)
            back, out = out[:count], out[count:]
            free.give(back if seed % 2 else np.array(back, np.int32))
            available |= set(back)
        elif count <= len(available):
            pages = [free.take_one()] if verb == "one" and available else free.take(count)
            assert all(a < b for a, b in pairwise(pages))
            assert set(pages) <= available
            available -= set(pages)
            out += pages
        assert free.count == len(available)
        assert set(free.listed().tolist()) == available


@pytest.mark.parametrize("freed", [3, 10, 90, 600])
def test_few_and_many_returned_pages_are_put_in_order_alike(freed: int) -> None:
    free = FreePages(640)
    pages = free.take(638)
    random.Random(freed).shuffle(pages)
    free.give(pages[:freed])
    assert free.take(freed + 2) == sorted([*pages[:freed], 638, 639])
    free.listed()
