"""This module owns the Triton attention backend: paged extend and split-KV decode, for NVIDIA and AMD GPUs from one source.

Both kernels follow FlashAttention (Dao et al., 2022: online softmax over blocks of keys) with the query heads that share a
key head as rows of one tile (grouped queries), and decode splits a long context over several programs and merges their parts
by log-sum-exp (Dao et al., Flash-Decoding, 2023). Keys and values are gathered through the page table, token by token, so
any page size will do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from radixlm.attention.base import Capabilities, LayerSpec, StepInputs
from radixlm.memory.pool import KVPool
from radixlm.ops.triton_kernels import write_kv

CAPABILITIES = Capabilities(
    devices=frozenset({"cuda"}),
    dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
    head_dims=frozenset({16, 32, 64, 80, 96, 128, 256}),
    requires=("triton",),
)

#: log2(e): the kernels use powers of two, which the hardware has an instruction for.
LOG2E = 1.4426950408889634


@triton.jit
def _scores(q, k, position, limit, first, scale, CAP: tl.constexpr, PRECISION: tl.constexpr):
    """Scaled (and capped) scores of a query tile and a key tile, in units of log2, -inf where a query may not look."""
    s = tl.dot(q, k, input_precision=PRECISION) * scale
    if CAP > 0:
        # tanh by exp: x is in units of log2, the cap is not.
        e = tl.exp2(s * (2.0 / CAP))
        s = CAP * 1.4426950408889634 * (1.0 - 2.0 / (e + 1.0))
    visible = (position[None, :] <= limit[:, None]) & (position[None, :] >= first[:, None])
    return tl.where(visible, s, float("-inf"))


@triton.jit
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, part_ptr, lse_ptr, table_ptr, rows_ptr, positions_ptr,
    q_token, q_head, kv_slot, kv_head, out_token, table_row,
    scale,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One row, one key head, one part of its context."""
    token, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(rows_ptr + token)
    last = tl.load(positions_ptr + token).to(tl.int32)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(last - WINDOW + 1, 0)
    each = tl.cdiv(tl.cdiv(last + 1 - begin, SPLITS), BLOCK) * BLOCK
    low = begin + split * each
    high = tl.minimum(low + each, last + 1)

    group = tl.arange(0, ROWS)
    dim = tl.arange(0, WIDE)
    heads = head * GROUP + group
    q = tl.load(
        q_ptr + token * q_token + heads[:, None] * q_head + dim[None, :],
        mask=(group < GROUP)[:, None] & (dim < DIM)[None, :],
        other=0.0,
    )
    limit = tl.zeros([ROWS], tl.int32) + last
    first = tl.zeros([ROWS], tl.int32) + begin
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDE], tl.float32)
    for n in range(low, high, BLOCK):
        position = n + tl.arange(0, BLOCK)
        there = position < high
        page = tl.load(table_ptr + row * table_row + position // PAGE, mask=there, other=0).to(tl.int64)
        slot = page * PAGE + position % PAGE
        k = tl.load(
            k_ptr + slot[None, :] * kv_slot + head * kv_head + dim[:, None],
            mask=there[None, :] & (dim < DIM)[:, None],
            other=0.0,
        )
        s = _scores(q, k.to(q.dtype), tl.where(there, position, 2147483647), limit, first, scale, CAP, PRECISION)
        new = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - new[:, None])
        shrink = tl.exp2(top - new)
        v = tl.load(
            v_ptr + slot[:, None] * kv_slot + head * kv_head + dim[None, :],
            mask=there[:, None] & (dim < DIM)[None, :],
            other=0.0,
        )
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.dot(p.to(q.dtype), v.to(q.dtype), input_precision=PRECISION)
        top = new
    stored = (group < GROUP)[:, None] & (dim < DIM)[None, :]
    if SPLITS == 1:
        out = out_ptr + token * out_token + heads[:, None] * DIM + dim[None, :]
        tl.store(out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=stored)
    else:
        # A part that has no positions keeps weight 0 in the merge.
        some = total > 0
        part = (token * tl.num_programs(1) * GROUP + heads) * SPLITS + split
        value = acc / tl.where(some, total, 1.0)[:, None]
        tl.store(part_ptr + part[:, None] * DIM + dim[None, :], value, mask=stored)
        tl.store(lse_ptr + part, tl.where(some, top + tl.log2(total), float("-inf")), mask=group < GROUP)


@triton.jit
def _merge_kernel(
    part_ptr, lse_ptr, out_ptr, out_token, DIM: tl.constexpr, WIDE: tl.constexpr, SPLITS: tl.constexpr, MANY: tl.constexpr
):
    """The parts of one row and one query head, weighted by the exponentials of their log-sum-exps."""
    token, head = tl.program_id(0), tl.program_id(1)
    first = (token * tl.num_programs(1) + head) * SPLITS
    split = tl.arange(0, MANY)
    dim = tl.arange(0, WIDE)
    lse = tl.load(lse_ptr + first + split, mask=split < SPLITS, other=float("-inf"))
    weight = tl.exp2(lse - tl.max(lse, 0))
    part = tl.load(
        part_ptr + (first + split)[:, None] * DIM + dim[None, :],
        mask=(split < SPLITS)[:, None] & (dim < DIM)[None, :],
        other=0.0,
    )
    value = tl.sum(part * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out_ptr + token * out_token + head * DIM + dim, value.to(out_ptr.dtype.element_ty), mask=dim < DIM)


@triton.jit
def _extend_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, tiles_ptr,
    q_token, q_head, kv_slot, kv_head, out_token, table_row,
    scale,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A run of tokens of one span with all query heads of one key head: ROWS // GROUP tokens, ROWS rows of a tile."""
    tile, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(tiles_ptr + tile * 4).to(tl.int64)
    token0 = tl.load(tiles_ptr + tile * 4 + 1)  # index of the tile's first token in the step
    start = tl.load(tiles_ptr + tile * 4 + 2)  # its position
    count = tl.load(tiles_ptr + tile * 4 + 3)  # its tokens

    m = tl.arange(0, ROWS)
    dim = tl.arange(0, WIDE)
    of = m // GROUP
    heads = head * GROUP + m % GROUP
    used = of < count
    here = (used[:, None]) & (dim < DIM)[None, :]
    q = tl.load(q_ptr + (token0 + of)[:, None] * q_token + heads[:, None] * q_head + dim[None, :], mask=here, other=0.0)
    limit = start + tl.where(used, of, 0)
    first = tl.zeros([ROWS], tl.int32)
    begin = 0
    if WINDOW > 0:
        first = tl.maximum(limit - WINDOW + 1, 0)
        begin = tl.maximum(start - WINDOW + 1, 0) // BLOCK * BLOCK
    end = start + count

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDE], tl.float32)
    for n in range(begin, end, BLOCK):
        position = n + tl.arange(0, BLOCK)
        there = position < end
        page = tl.load(table_ptr + row * table_row + position // PAGE, mask=there, other=0).to(tl.int64)
        slot = page * PAGE + position % PAGE
        k = tl.load(
            k_ptr + slot[None, :] * kv_slot + head * kv_head + dim[:, None],
            mask=there[None, :] & (dim < DIM)[:, None],
            other=0.0,
        )
        s = _scores(q, k.to(q.dtype), position, limit, first, scale, CAP, PRECISION)
        new = tl.maximum(top, tl.max(s, 1))
        # A row whose window starts behind this block has seen nothing yet.
        base = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2(s - base[:, None])
        shrink = tl.exp2(top - base)
        v = tl.load(
            v_ptr + slot[:, None] * kv_slot + head * kv_head + dim[None, :],
            mask=there[:, None] & (dim < DIM)[None, :],
            other=0.0,
        )
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.dot(p.to(q.dtype), v.to(q.dtype), input_precision=PRECISION)
        top = new
    out = out_ptr + (token0 + of)[:, None] * out_token + heads[:, None] * DIM + dim[None, :]
    tl.store(out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=here)


@dataclass(slots=True, eq=False)
class TritonPlan:
    """One step. `tiles` [n, 4] int32: row, first token's index, its position, count; made for extends only."""

    inputs: StepInputs
    splits: int
    tiles: dict[int, torch.Tensor]


class TritonAttention:
    """Stateless but for nothing: workspaces come from the allocator, which a captured graph keeps alive."""

    capabilities = CAPABILITIES

    def __init__(self) -> None:
        self._multiprocessors = 0

    def plan(self, inputs: StepInputs, pool: KVPool) -> TritonPlan:
        return TritonPlan(inputs, 0, {})

    def run(
        self, plan: TritonPlan, layer: int, spec: LayerSpec, pool: KVPool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        self.store(layer, pool, plan.inputs.slots, k, v)
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
        run = self._decode if plan.inputs.decode else self._extend
        run(plan, layer, spec, pool, q, out)

    def _decode(
        self, plan: TritonPlan, layer: int, spec: LayerSpec, pool: KVPool, q: torch.Tensor, out: torch.Tensor
    ) -> None:
        inputs, keys, values = plan.inputs, pool.keys[layer], pool.values[layer]
        splits = self._splits(len(q) * spec.kv_heads, q.device)
        group = spec.heads // spec.kv_heads
        part = lse = out
        if splits > 1:
            part = q.new_empty(len(q), spec.heads, splits, spec.head_dim, dtype=torch.float32)
            lse = q.new_empty(len(q), spec.heads, splits, dtype=torch.float32)
        wide = triton.next_power_of_2(spec.head_dim)
        _decode_kernel[(len(q), spec.kv_heads, splits)](
            q, keys, values, out, part, lse, inputs.page_table, inputs.rows, inputs.positions,
            q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), out.stride(0), inputs.page_table.stride(0),
            spec.scale * LOG2E,
            GROUP=group, ROWS=max(16, triton.next_power_of_2(group)), DIM=spec.head_dim, WIDE=wide, PAGE=inputs.page_size,
            WINDOW=spec.window, CAP=spec.soft_cap, BLOCK=32 if wide > 128 else 64, SPLITS=splits,
            PRECISION=_precision(q.dtype), num_warps=4, num_stages=3,
        )  # fmt: skip
        if splits > 1:
            _merge_kernel[(len(q), spec.heads)](
                part, lse, out, out.stride(0), DIM=spec.head_dim, WIDE=wide, SPLITS=splits,
                MANY=triton.next_power_of_2(splits), num_warps=2,
            )  # fmt: skip

    def _extend(
        self, plan: TritonPlan, layer: int, spec: LayerSpec, pool: KVPool, q: torch.Tensor, out: torch.Tensor
    ) -> None:
        inputs, keys, values = plan.inputs, pool.keys[layer], pool.values[layer]
        group = spec.heads // spec.kv_heads
        wide = triton.next_power_of_2(spec.head_dim)
        rows = max(128 if wide <= 128 and q.dtype != torch.float32 else 64, triton.next_power_of_2(group))
        tiles = plan.tiles.get(rows // group)
        if tiles is None:
            tiles = plan.tiles[rows // group] = _tiles(inputs, rows // group)
        _extend_kernel[(len(tiles), spec.kv_heads)](
            q, keys, values, out, inputs.page_table, tiles,
            q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), out.stride(0), inputs.page_table.stride(0),
            spec.scale * LOG2E,
            GROUP=group, ROWS=rows, DIM=spec.head_dim, WIDE=wide, PAGE=inputs.page_size, WINDOW=spec.window,
            CAP=spec.soft_cap, BLOCK=64 if wide <= 128 else 32, PRECISION=_precision(q.dtype),
            num_warps=8 if rows >= 128 else 4, num_stages=2,
        )  # fmt: skip

    def _splits(self, programs: int, device: torch.device) -> int:
        """Parts of each context, so that small batches fill the GPU too. A function of the batch's shape alone."""
        if not self._multiprocessors:
            on_gpu = device.type == "cuda"
            self._multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 4
        return max(1, min(32, 4 * self._multiprocessors // programs))


def _tiles(inputs: StepInputs, size: int) -> torch.Tensor:
    """Runs of at most `size` tokens: the longest contexts first, so that the last programs to start are short ones."""
    tiles: list[tuple[int, int, int, int]] = []
    first = 0
    for row, start, length in zip(inputs.rows.tolist(), inputs.starts, inputs.lengths, strict=True):
        tiles.extend(
            (row, first + at, start + at, min(size, length - at)) for at in range(0, length, size)
        )
        first += length
    tiles.sort(key=lambda tile: -tile[2])
    return torch.tensor(tiles, dtype=torch.int32).to(inputs.rows.device, non_blocking=True)


def _precision(dtype: torch.dtype) -> str:
    # float32 is asked for by those who compare: tf32 would keep 10 bits of it.
    return "ieee" if dtype == torch.float32 else "tf32"
