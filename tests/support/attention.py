"""Steps made by hand for attention backends, on any device."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from radixlm.attention.base import AttentionBackend, LayerSpec, StepInputs
from radixlm.memory.pool import KVPool


def make_step(
    spans: Sequence[tuple[int, int]], page_size: int, device: torch.device, seed: int = 0
) -> tuple[StepInputs, int]:
    """A step of (start, length) spans over shuffled pages, and the pages that its pool needs."""
    rng = random.Random(seed)
    per_row = [-(-(start + length) // page_size) for start, length in spans]
    pages = list(range(sum(per_row) + 3))
    rng.shuffle(pages)
    rows = list(range(len(spans) + 1))
    rng.shuffle(rows)
    table = torch.zeros(len(rows), max(per_row) + 2, dtype=torch.int32)
    positions: list[int] = []
    slots: list[int] = []
    taken = iter(pages)
    for row, (start, length), count in zip(rows, spans, per_row, strict=False):
        mine = [next(taken) for _ in range(count)]
        table[row, :count] = torch.tensor(mine, dtype=torch.int32)
        for position in range(start, start + length):
            positions.append(position)
            slots.append(mine[position // page_size] * page_size + position % page_size)
    inputs = StepInputs(
        ids=torch.zeros(len(positions), dtype=torch.int64, device=device),
        positions=torch.tensor(positions, device=device),
        slots=torch.tensor(slots, device=device),
        rows=torch.tensor(rows[: len(spans)], device=device),
        starts=[start for start, _ in spans],
        lengths=[length for _, length in spans],
        page_table=table.to(device),
        page_size=page_size,
        select=torch.zeros(0, dtype=torch.int64, device=device),
        decode=all(length == 1 for _, length in spans),
    )
    return inputs, len(pages)


def attended(
    backend: AttentionBackend,
    inputs: StepInputs,
    pages: int,
    spec: LayerSpec,
    dtype: torch.dtype,
    seed: int = 0,
) -> torch.Tensor:
    """What a backend makes of random q, k, v and a pool of random KV; the same for the same seed."""
    device = inputs.slots.device
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)

    pool = KVPool([(spec.kv_heads, spec.head_dim)], pages, inputs.page_size, dtype, device)
    pool.heads[0].copy_(draw(*pool.heads[0].shape))
    count = len(inputs.slots)
    q, k = draw(count, spec.heads, spec.head_dim), draw(count, spec.kv_heads, spec.head_dim)
    v = draw(count, spec.kv_heads, spec.head_dim)
    return backend.run(backend.plan(inputs, pool), 0, spec, pool, q, k, v)
