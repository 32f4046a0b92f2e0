"""How groups become tiles: every row meets every position of its prefix exactly once, and all fits its arrays."""

from __future__ import annotations

import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from radixlm.attention.base import LayerSpec
from radixlm.attention.tiles import LEAST_PIECE, Tiling
from radixlm.base.plan import SharedPrefix
from support.attention import describe, together

CPU = torch.device("cpu")


def random_groups(rng: random.Random, spans: int) -> tuple[SharedPrefix, ...]:
    """Disjoint groups of two and more of so many spans."""
    rest = rng.sample(range(spans), spans)
    groups = []
    while len(rest) > 1 and rng.random() < 0.9:
        count = min(len(rest), rng.choice((2, 2, 3, rng.randint(2, 40))))
        groups.append((sorted(rest[:count]), rng.choice((1, 300, rng.randint(1, 20_000)))))
        rest = rest[count:]
    return together(*groups)


@given(st.integers(0, 2**32), st.integers(2, 80), st.sampled_from([4, 5, 16, 64]), st.sampled_from([1, 2, 33, 264]))
def test_each_row_meets_its_prefix_once(seed: int, spans: int, rows: int, fill: int) -> None:
    groups = random_groups(random.Random(seed), spans)
    tiling = Tiling(rows, fill)
    tiles = describe(tiling, groups, spans + 3, CPU)  # a graph pads its batch
    assert tiles.members.shape == (tiling.pieces(spans + 3), rows) and tiles.shares.shape == (spans + 3, 4)
    met: dict[int, list[tuple[int, int]]] = {}
    numbers: dict[int, list[int]] = {}
    for members, (begin, end, number) in zip(tiles.members.tolist(), tiles.pieces.tolist(), strict=True):
        if begin == end:
            continue
        spans_here = [span for span in members if span >= 0]
        assert spans_here == members[: len(spans_here)] and spans_here
        for i, span in enumerate(spans_here):
            met.setdefault(span, []).append((begin, end))
            numbers.setdefault(span, []).append(number + i)
    shared = {span: group.length for group in groups for span in group.spans.tolist()}
    assert met.keys() == shared.keys()
    for span, (length, first, count, step) in enumerate(tiles.shares.tolist()):
        assert length == shared.get(span, 0) and (count > 0) == (length > 0)
        assert [first + i * step for i in range(count)] == numbers.get(span, [])
        ends = [0, *(end for _, end in met.get(span, []))]
        assert [begin for begin, _ in met.get(span, [])] == ends[:-1] and ends[-1] == length
    every = [number for some in numbers.values() for number in some]
    assert len(set(every)) == len(every) and max(every, default=0) < tiles.partials


def test_work_is_about_equal_and_fills_the_device() -> None:
    """16 groups of 16 rows over 2048 positions on 132 multiprocessors with 8 key heads."""
    tiling = Tiling.of([LayerSpec(heads=32, kv_heads=8, head_dim=128, scale=1.0)], 132)
    assert tiling == Tiling(rows=16, fill=33)
    groups = together(*(([16 * g + i for i in range(16)], 2048) for g in range(16)))
    pieces = describe(tiling, groups, 256, CPU).pieces
    lengths = (pieces[:, 1] - pieces[:, 0])[pieces[:, 1] > 0].tolist()
    assert lengths == [1024] * 32
    # One short prefix is not cut finer than pays.
    pieces = describe(tiling, together(([0, 1], 3 * LEAST_PIECE)), 2, CPU).pieces
    assert (pieces[:, 1] > pieces[:, 0]).sum() == 3


def test_layers_decide_how_many_rows_a_tile_has() -> None:
    def spec(heads: int, kv_heads: int, window: int = 0) -> LayerSpec:
        return LayerSpec(heads=heads, kv_heads=kv_heads, head_dim=64, scale=1.0, window=window)

    assert Tiling.of([spec(32, 8)], 100) == Tiling(16, 25)
    assert Tiling.of([spec(9, 3)], 100) == Tiling(16, 67)
    assert Tiling.of([spec(8, 8)], 100) == Tiling(64, 25)
    assert Tiling.of([spec(64, 1)], 100) == Tiling(4, 200)
    assert Tiling.of([spec(4, 1, window=512), spec(16, 8)], 100) == Tiling(32, 25)
    assert Tiling.of([spec(4, 1, window=512)], 100) is None
