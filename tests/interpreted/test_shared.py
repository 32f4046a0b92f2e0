"""Prefixes that rows share, read once: the Triton kernels, interpreted, against the reference that knows no groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from radixlm.attention.base import AttentionBackend, LayerSpec
from radixlm.attention.tiles import Tiling
from radixlm.attention.torch_ref import TorchReference
from radixlm.base.plan import Join, Plan, SharedPrefix
from radixlm.base.sampling import SamplingParams
from radixlm.device.cpu import CpuDevice
from radixlm.memory.table import RowTables
from radixlm.runner.inputs import InputBuilder
from support.attention import attended, make_step, together

CPU = torch.device("cpu")
FOUR = LayerSpec(heads=8, kv_heads=2, head_dim=16, scale=0.25)
THREE = LayerSpec(heads=6, kv_heads=2, head_dim=16, scale=0.3)
ODD = LayerSpec(heads=2, kv_heads=2, head_dim=24, scale=0.2)
CAPPED = LayerSpec(heads=8, kv_heads=2, head_dim=16, scale=0.25, soft_cap=5.0)
WINDOW = LayerSpec(heads=4, kv_heads=1, head_dim=16, scale=0.25, window=40)


def error(
    spec: LayerSpec,
    starts: Sequence[int],
    groups: tuple[SharedPrefix, ...],
    page_size: int,
    dtype: torch.dtype = torch.float32,
    tiling: Tiling | None = None,
    extends: Sequence[tuple[int, int]] = (),
) -> float:
    """How far a step of decode rows with shared prefixes, and extends, is from the reference."""
    from radixlm.attention.triton import TritonAttention

    tiling = tiling or Tiling.of([spec], 4) or Tiling(4, 2)
    spans = [*((start, 1) for start in starts), *extends]
    inputs, pages = make_step(spans, page_size, CPU, groups=groups, tiling=tiling)
    got = attended(TritonAttention(), inputs, pages, spec, dtype).float()
    expected = attended(TorchReference(), inputs, pages, spec, dtype).float()
    assert torch.isfinite(got).all()
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("spec", [FOUR, THREE, ODD, CAPPED], ids=["four", "three", "odd", "capped"])
def test_two_groups_and_rows_that_share_nothing(spec: LayerSpec, page_size: int) -> None:
    starts = [100, 7, 81, 200, 96, 0, 130, 97]
    groups = together(([0, 3, 4], 80), ([2, 6], 64 if page_size > 1 else 37))
    assert error(spec, starts, groups, page_size) < 1e-5


@pytest.mark.parametrize(("members", "length", "page_size"), [(2, 96, 16), (16, 70, 1), (17, 33, 1), (20, 144, 16)])
def test_groups_of_any_size(members: int, length: int, page_size: int) -> None:
    """More rows than a tile holds, and a row whose own part is but the current token."""
    starts = [length + 5 * i for i in range(members)]
    assert error(FOUR, [*starts, 20], together((range(members), length)), page_size) < 1e-5


@pytest.mark.parametrize("fill", [1, 7])
def test_prefixes_cut_into_pieces(fill: int) -> None:
    """A prefix of several pieces, and tiles of four rows: one has fewer."""
    groups = together(([0, 2, 3, 4, 6], 700), ([1, 5], 290))
    starts = [700, 300, 710, 733, 800, 290, 701]
    assert error(THREE, starts, groups, 1, tiling=Tiling(rows=4, fill=fill)) < 1e-5


def test_half_precision() -> None:
    assert error(FOUR, [90, 64, 130], together(([0, 1, 2], 64)), 16, torch.float16) < 2e-3


def test_window_layers_read_for_themselves() -> None:
    assert error(WINDOW, [100, 64, 130], together(([0, 1, 2], 64)), 16) < 1e-5


def test_decode_rows_share_beside_extends() -> None:
    assert error(FOUR, [90, 64, 130], together(([0, 2], 80)), 16, extends=[(70, 9), (0, 21)]) < 1e-5


def test_no_group_at_all() -> None:
    """What a captured step computes before it is told of any group."""
    assert error(FOUR, [3, 90], (), 1) < 1e-5


def test_plans_become_steps_that_share() -> None:
    """From plans through the row tables to attention, as the runner does it; a steady batch keeps its tiles."""
    from radixlm.attention.triton import TritonAttention

    page_size, length, count = 16, 64, 3
    tables = RowTables(4, 200, page_size, CpuDevice())
    builder = InputBuilder(tables, CpuDevice(), Tiling(rows=4, fill=2))
    prefix = list(range(5, 5 + length // page_size))
    greedy = SamplingParams(temperature=0.0)
    joins = []
    for row in range(count):
        pages = np.array([*prefix, *range(20 + 5 * row, 25 + 5 * row)], np.int32)
        joins.append(Join(row, row, np.arange(1, 100, dtype=np.int32), pages, 90, greedy))
    first = Plan(
        step=1,
        rows=np.array([2, 0, 1], np.int32),
        starts=np.array([98, 70, 64], np.int32),
        lengths=np.ones(count, np.int32),
        samples=np.ones(count, np.bool_),
        joins=tuple(joins),
        shared=together(([0, 2], length)),
    )
    tables.apply(first)
    plain = InputBuilder(tables, CpuDevice())

    def attend(backend: AttentionBackend, plan: Plan, build: InputBuilder) -> torch.Tensor:
        return attended(backend, build.build(plan), 40, FOUR, torch.float32)

    second = replace(first, step=2, starts=first.starts + 1, joins=())
    third = replace(second, step=3, shared=together(([0, 1, 2], length)))
    fourth = replace(third, step=4, shared=())
    for plan in (first, second, third, fourth):
        assert plain.build(plan).shared is None
        got, expected = attend(TritonAttention(), plan, builder), attend(TorchReference(), plan, plain)
        assert (got - expected).norm() / expected.norm() < 1e-5
    tiles = [builder.build(plan).shared for plan in (first, second, third, fourth)]
    assert tiles[0] is tiles[1] is not None and tiles[2] is not tiles[1] and tiles[3] is None
