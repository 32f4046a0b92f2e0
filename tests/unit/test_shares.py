"""Who holds what: shares cover everything, once, in order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixlm.parallel.shares import Cut, cut, fits, nearest, share


@given(units=st.integers(1, 64), size=st.integers(1, 16))
def test_shares_are_equal_and_cover_all(units: int, size: int) -> None:
    if not fits(units, size):
        return
    shares = [share(units, rank, size) for rank in range(size)]
    held = [list(range(first, first + count)) for first, count in shares]
    assert len({count for _, count in shares}) == 1
    assert {unit for part in held for unit in part} == set(range(units))
    holders = [sum(unit in part for part in held) for unit in range(units)]
    assert set(holders) == {max(1, size // units)}, "every unit is held by equally many"


@given(kv_heads=st.integers(1, 16), group=st.integers(1, 8), size=st.integers(1, 16))
def test_query_heads_find_their_key_value_heads_beside_them(kv_heads: int, group: int, size: int) -> None:
    """A rank's query head i attends with its kv head i // (heads / kv heads), as in a model of its own."""
    heads = kv_heads * group
    if heads % size or not fits(kv_heads, size):
        return
    for rank in range(size):
        (first, count), (kv_first, kv_count) = share(heads, rank, size), share(kv_heads, rank, size)
        assert count % kv_count == 0
        for i in range(count):
            assert (first + i) // group == kv_first + i // (count // kv_count)


def test_cuts_are_whole_units() -> None:
    assert [cut(1, 48, 3, rank, 3) for rank in range(3)] == [Cut(1, 16 * rank, 16) for rank in range(3)]
    assert [cut(0, 32, 2, rank, 4) for rank in range(4)] == [Cut(0, start, 16) for start in (0, 0, 16, 16)]


@pytest.mark.parametrize(("size", "expected"), [(2, [1, 3]), (4, [3, 9]), (10, [9])])
def test_the_nearest_that_work(size: int, expected: list[int]) -> None:
    assert nearest(size, lambda n: 9 % n == 0) == expected
