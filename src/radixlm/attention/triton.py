"""This module owns the Triton attention backend: paged extend, split-KV decode and prefixes read once for all rows that
share them, for NVIDIA and AMD GPUs from one source (the kernels are in `attention.triton_kernels`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

from radixlm.attention import triton_ways
from radixlm.attention.base import Capabilities, LayerSpec, SharedTiles, StepInputs
from radixlm.attention.triton_kernels import decode_kernel, extend_kernel, merge_kernel, shared_kernel
from radixlm.memory.pool import KVPool
from radixlm.ops.triton_kernels import write_kv

CAPABILITIES = Capabilities(
    devices=frozenset({"cuda"}),
    dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
    kv_dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2}),
    head_dims=frozenset({16, 32, 64, 80, 96, 128, 256}),
    requires=("triton",),
    shared_prefix=True,
)

#: log2(e): the kernels use powers of two, which the hardware has an instruction for.
LOG2E = 1.4426950408889634


#: Partial results that are merged at once: most often all there are.
PARTS = 32


@dataclass(slots=True, eq=False)
class TritonPlan:
    """One step: decode rows first, then extends.

    Attributes:
        decodes: the leading decode rows as a step of their own, None if there are none.
        tiles: of the extends, by tokens of a tile: [n, 4] int32: row, first token's index, its position, count.
    """

    inputs: StepInputs
    decodes: StepInputs | None
    tiles: dict[int, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """Partial results of a decode step (see `attention.triton_kernels`): `values` [n, head_dim], `sums` [n]; the first
    `own` are the rows' own.
    """

    values: torch.Tensor
    sums: torch.Tensor
    own: int


class TritonAttention:
    """Stateless but for nothing: workspaces come from the allocator, which a captured graph keeps alive."""

    capabilities = CAPABILITIES

    def __init__(self) -> None:
        self._multiprocessors = 0

    def plan(self, inputs: StepInputs, pool: KVPool) -> TritonPlan:
        if inputs.decode:
            return TritonPlan(inputs, inputs, {})
        count = next((i for i, length in enumerate(inputs.lengths) if length > 1), len(inputs.lengths))
        # A decode row would be one token in a tile made for many, and go through its whole context alone.
        decodes = replace(
            inputs,
            rows=inputs.rows[:count],
            positions=inputs.positions[:count],
            starts=inputs.starts[:count],
            lengths=inputs.lengths[:count],
            decode=True,
        )
        return TritonPlan(inputs, decodes if count else None, {})

    def run(
        self,
        plan: TritonPlan,
        layer: int,
        spec: LayerSpec,
        pool: KVPool,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        self.store(layer, pool, plan.inputs.slots, k, v)
        return self.run_stored(plan, layer, spec, pool, q, k, v)

    def run_stored(
        self,
        plan: TritonPlan,
        layer: int,
        spec: LayerSpec,
        pool: KVPool,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        out = q.new_empty(len(q), spec.heads * spec.head_dim)
        self.attend(plan, layer, spec, pool, q, out)
        return out

    def store(self, layer: int, pool: KVPool, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put k, v [T, kv_heads, head_dim] into the pool."""
        write_kv(pool.keys[layer], pool.values[layer], slots, k, v)

    def attend(
        self, plan: TritonPlan, layer: int, spec: LayerSpec, pool: KVPool, q: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Attend for the tokens of the plan, whose keys and values are stored; out [T, heads * head_dim]."""
        count = 0
        if plan.decodes is not None:
            count = len(plan.decodes.rows)
            self._decode(plan.decodes, layer, spec, pool, q[:count], out[:count])
        if count < len(q):
            self._extend(plan, layer, spec, pool, q, out)

    def _decode(
        self, inputs: StepInputs, layer: int, spec: LayerSpec, pool: KVPool, q: torch.Tensor, out: torch.Tensor
    ) -> None:
        keys, values = pool.keys[layer], pool.values[layer]
        # A window ends long before the prefix does: each row then reads its own.
        shared = None if spec.window else inputs.shared
        splits = self._splits(len(q) * spec.kv_heads, q.device)
        group = spec.heads // spec.kv_heads
        wide = triton.next_power_of_2(spec.head_dim)
        parts = _Parts(out, out, 0)
        if shared is not None or splits > 1:
            parts = _parts(q, len(q) * spec.heads * splits, 0 if shared is None else shared.partials * spec.heads)
        shares = inputs.rows if shared is None else shared.shares
        if shared is not None:
            _share(inputs, shared, spec, keys, values, q, parts)
        way = triton_ways.decode(wide, max(q.element_size(), keys.element_size()), splits)
        decode_kernel[(len(q), spec.kv_heads, splits)](
            q, keys, values, out, parts.values, parts.sums, inputs.page_table, inputs.rows, inputs.positions, shares,
            q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), out.stride(0), inputs.page_table.stride(0),
            splits, spec.scale * LOG2E,
            GROUP=group, ROWS=max(16, triton.next_power_of_2(group)), DIM=spec.head_dim, WIDE=wide,
            PAGE=inputs.page_size, WINDOW=spec.window, CAP=spec.soft_cap, BLOCK=way.block,
            WHOLE=splits == 1 and shared is None, SHARED=shared is not None, PRECISION=_precision(q.dtype),
            num_warps=way.warps, num_stages=way.stages,
        )  # fmt: skip
        if shared is not None or splits > 1:
            merge_kernel[(len(q), spec.heads)](
                parts.values, parts.sums, out, shares, parts.own, splits, out.stride(0), DIM=spec.head_dim, WIDE=wide,
                MANY=PARTS, SHARED=shared is not None, num_warps=2,
            )  # fmt: skip

    def _extend(
        self, plan: TritonPlan, layer: int, spec: LayerSpec, pool: KVPool, q: torch.Tensor, out: torch.Tensor
    ) -> None:
        inputs, keys, values = plan.inputs, pool.keys[layer], pool.values[layer]
        group = spec.heads // spec.kv_heads
        wide = triton.next_power_of_2(spec.head_dim)
        way = triton_ways.extend(wide, max(q.element_size(), keys.element_size()))
        rows = max(way.rows, triton.next_power_of_2(group))
        tiles = plan.tiles.get(rows // group)
        if tiles is None:
            decodes = 0 if plan.decodes is None else len(plan.decodes.rows)
            tiles = plan.tiles[rows // group] = _tiles(inputs, decodes, rows // group)
        extend_kernel[(len(tiles), spec.kv_heads)](
            q, keys, values, out, inputs.page_table, tiles,
            q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), out.stride(0), inputs.page_table.stride(0),
            spec.scale * LOG2E,
            GROUP=group, ROWS=rows, DIM=spec.head_dim, WIDE=wide, PAGE=inputs.page_size, WINDOW=spec.window,
            CAP=spec.soft_cap, BLOCK=way.block, PRECISION=_precision(q.dtype), num_warps=way.warps,
            num_stages=way.stages,
        )  # fmt: skip

    def _splits(self, programs: int, device: torch.device) -> int:
        """Parts of each context, so that small batches fill the GPU too. A function of the batch's shape alone."""
        if not self._multiprocessors:
            on_gpu = device.type == "cuda"
            self._multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 4
        return max(1, min(32, 4 * self._multiprocessors // programs))


def _parts(q: torch.Tensor, own: int, shared: int) -> _Parts:
    return _Parts(
        q.new_empty(own + shared, q.shape[-1], dtype=torch.float32), q.new_empty(own + shared, dtype=torch.float32), own
    )


def _share(
    inputs: StepInputs,
    shared: SharedTiles,
    spec: LayerSpec,
    keys: torch.Tensor,
    values: torch.Tensor,
    q: torch.Tensor,
    parts: _Parts,
) -> None:
    """The partial results of shared prefixes. Programs beyond the pieces there are end at once."""
    group = spec.heads // spec.kv_heads
    pieces, members = shared.members.shape
    wide = triton.next_power_of_2(spec.head_dim)
    rows = max(16, triton.next_power_of_2(members * group))
    way = triton_ways.shared(wide, max(q.element_size(), keys.element_size()), rows)
    shared_kernel[(spec.kv_heads, pieces)](
        q, keys, values, parts.values, parts.sums, inputs.page_table, inputs.rows, shared.members, shared.pieces,
        parts.own, q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), inputs.page_table.stride(0),
        spec.scale * LOG2E,
        GROUP=group, MEMBERS=members, ROWS=rows, DIM=spec.head_dim, WIDE=wide, PAGE=inputs.page_size, CAP=spec.soft_cap,
        BLOCK=way.block, PRECISION=_precision(q.dtype), num_warps=way.warps, num_stages=way.stages,
    )  # fmt: skip


def _tiles(inputs: StepInputs, skip: int, size: int) -> torch.Tensor:
    """Runs of at most `size` tokens of all spans but the first `skip` (of one token each): the longest contexts first,
    so that the last programs to start are short ones. Of a decode step a tile for each row, made on the device: a
    captured step has nothing on the host.
    """
    if inputs.decode:
        ones = torch.ones_like(inputs.positions)
        return torch.stack((inputs.rows, ones.cumsum(0) - 1, inputs.positions, ones), 1).int()
    tiles: list[tuple[int, int, int, int]] = []
    first = skip
    spans = zip(inputs.row_ids[skip:], inputs.starts[skip:], inputs.lengths[skip:], strict=True)
    for row, start, length in spans:
        tiles.extend((row, first + at, start + at, min(size, length - at)) for at in range(0, length, size))
        first += length
    tiles.sort(key=lambda tile: -tile[2])
    device = inputs.rows.device
    return torch.tensor(tiles, dtype=torch.int32, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def _precision(dtype: torch.dtype) -> str:
    # float32 is asked for by those who compare: tf32 would keep 10 bits of it.
    return "ieee" if dtype == torch.float32 else "tf32"
