"""Steps made by hand for attention backends, on any device."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch

from radixlm.attention.base import AttentionBackend, LayerSpec, SharedTiles, StepInputs
from radixlm.attention.tiles import Tiling
from radixlm.base.plan import SharedPrefix
from radixlm.memory.pool import KVPool


def make_step(
    spans: Sequence[tuple[int, int]],
    page_size: int,
    device: torch.device,
    seed: int = 0,
    groups: Sequence[SharedPrefix] = (),
    tiling: Tiling | None = None,
) -> tuple[StepInputs, int]:
    """A step of (start, length) spans over shuffled pages, and the pages that its pool needs.

    Args:
        groups: spans of one token, before all longer ones, whose rows have the same pages in front.
        tiling: tell the backend of them.
    """
    rng = random.Random(seed)
    per_row = [-(-(start + length) // page_size) for start, length in spans]
    pages = list(range(sum(per_row) + 3))
    rng.shuffle(pages)
    rows = list(range(len(spans) + 1))
    rng.shuffle(rows)
    leaders = {span: (group.spans.tolist()[0], group.length // page_size) for group in groups for span in group.spans}
    held: list[list[int]] = []
    table = torch.zeros(len(rows), max(per_row) + 2, dtype=torch.int32)
    positions: list[int] = []
    slots: list[int] = []
    taken = iter(pages)
    for i, (row, (start, length), count) in enumerate(zip(rows, spans, per_row, strict=False)):
        mine = [next(taken) for _ in range(count)]
        held.append(mine)
        leader, shared = leaders.get(i, (i, 0))
        mine[:shared] = held[leader][:shared]
        table[row, :count] = torch.tensor(mine, dtype=torch.int32)
        for position in range(start, start + length):
            positions.append(position)
            slots.append(mine[position // page_size] * page_size + position % page_size)
    decodes = next((i for i, (_, length) in enumerate(spans) if length > 1), len(spans))
    inputs = StepInputs(
        ids=torch.zeros(len(positions), dtype=torch.int64, device=device),
        positions=torch.tensor(positions, device=device),
        slots=torch.tensor(slots, device=device),
        rows=torch.tensor(rows[: len(spans)], device=device),
        row_ids=rows[: len(spans)],
        starts=[start for start, _ in spans],
        lengths=[length for _, length in spans],
        page_table=table.to(device),
        page_size=page_size,
        select=torch.zeros(0, dtype=torch.int64, device=device),
        decode=all(length == 1 for _, length in spans),
        shared=None if tiling is None else describe(tiling, groups, decodes, device),
    )
    return inputs, len(pages)


def describe(tiling: Tiling, groups: Sequence[SharedPrefix], spans: int, device: torch.device) -> SharedTiles:
    return tiling.tiles(torch.from_numpy(tiling.numbers(groups, spans)).to(device), spans)


def together(*groups: tuple[Sequence[int], int]) -> tuple[SharedPrefix, ...]:
    """Groups from (spans, length)."""
    return tuple(SharedPrefix(np.array(spans, np.int32), length) for spans, length in groups)


def attended(
    backend: AttentionBackend,
    inputs: StepInputs,
    pages: int,
    spec: LayerSpec,
    dtype: torch.dtype,
    seed: int = 0,
    kv_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """What a backend makes of random q, k, v and a pool of random KV; the same for the same seed."""
    device = inputs.slots.device
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)

    pool = KVPool([(spec.kv_heads, spec.head_dim)], pages, inputs.page_size, kv_dtype or dtype, device)
    pool.heads[0].copy_(draw(*pool.heads[0].shape))
    count = len(inputs.slots)
    q, k = draw(count, spec.heads, spec.head_dim), draw(count, spec.kv_heads, spec.head_dim)
    v = draw(count, spec.kv_heads, spec.head_dim)
    return backend.run(backend.plan(inputs, pool), 0, spec, pool, q, k, v)
