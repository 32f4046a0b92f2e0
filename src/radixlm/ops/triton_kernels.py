"""This module owns the Triton kernels of elementwise ops: one pass over memory where PyTorch would take several.

Imported only where a GPU computes. The torch references are in the modules of the ops: `norm`, `rope`, `activation`,
`qkv`, and `sampling.sampler`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixlm.ops.norm import Norm
from radixlm.ops.triton_early import begin, launch, wait


@triton.jit
def _rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, eps_ptr, x_token, x_group, out_token, out_group, w_group,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    wait(EARLY)
    token, group = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    used = column < SIZE
    x = tl.load(x_ptr + token.to(tl.int64) * x_token + group * x_group + column, mask=used, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 0) / SIZE + tl.load(eps_ptr))
    weight = tl.load(weight_ptr + group * w_group + column, mask=used, other=0.0)
    out = out_ptr + token.to(tl.int64) * out_token + group * out_group + column
    tl.store(out, (x * inverse * weight).to(out_ptr.dtype.element_ty), mask=used)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    """See `ops.norm.rms_norm`. x [T, n] or [T, heads, n] with a dense last dimension; the result is dense."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    size = x.shape[-1]
    groups = x.shape[1] if x.dim() == 3 else 1
    block = triton.next_power_of_2(size)
    _rms_norm_kernel[(len(x), groups)](
        x, weight, out, eps, x.stride(0), x.stride(1) if groups > 1 else 0, out.stride(0),
        out.stride(1) if groups > 1 else 0, weight.stride(0) if weight.dim() == 2 else 0,
        SIZE=size, BLOCK=block, num_warps=max(1, min(8, block // 256)), **launch(x),
    )  # fmt: skip
    return out


@triton.jit
def _rotate_kernel(
    x_ptr, cos_ptr, sin_ptr, x_token, x_head, angle_token, HEADS: tl.constexpr, MANY: tl.constexpr, HALF: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, MANY)
    dim = tl.arange(0, WIDE)
    used = (head < HEADS)[:, None] & (dim < HALF)[None, :]
    first = x_ptr + token * x_token + head[:, None] * x_head + dim[None, :]
    cos = tl.load(cos_ptr + token * angle_token + dim, mask=dim < HALF, other=0.0).to(tl.float32)[None, :]
    # The second half of the sines is not negated.
    sin = tl.load(sin_ptr + token * angle_token + HALF + dim, mask=dim < HALF, other=0.0).to(tl.float32)[None, :]
    a = tl.load(first, mask=used, other=0.0).to(tl.float32)
    b = tl.load(first + HALF, mask=used, other=0.0).to(tl.float32)
    tl.store(first, (a * cos - b * sin).to(x_ptr.dtype.element_ty), mask=used)
    tl.store(first + HALF, (b * cos + a * sin).to(x_ptr.dtype.element_ty), mask=used)


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """See `ops.rope.rotate_`: x [T, heads, dim] in place by cos, sin [T, 1, dim]."""
    half = x.shape[-1] // 2
    _rotate_kernel[(len(x),)](
        x, cos, sin, x.stride(0), x.stride(1), cos.stride(0), HEADS=x.shape[1], MANY=triton.next_power_of_2(x.shape[1]),
        HALF=half, WIDE=triton.next_power_of_2(half), num_warps=4,
    )  # fmt: skip
    return x


@triton.jit
def _write_kernel(
    k_ptr, v_ptr, keys_ptr, values_ptr, slots_ptr, k_token, v_token, in_head, slot_stride, head_stride,
    HEADS: tl.constexpr, MANY: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    head = tl.arange(0, MANY)
    dim = tl.arange(0, WIDE)
    used = (head < HEADS)[:, None] & (dim < DIM)[None, :]
    read = head[:, None] * in_head + dim[None, :]
    write = slot * slot_stride + head[:, None] * head_stride + dim[None, :]
    k = tl.load(k_ptr + token * k_token + read, mask=used)
    v = tl.load(v_ptr + token * v_token + read, mask=used)
    tl.store(keys_ptr + write, k.to(keys_ptr.dtype.element_ty), mask=used)
    tl.store(values_ptr + write, v.to(values_ptr.dtype.element_ty), mask=used)


def write_kv(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """k, v [T, heads, dim] (equal strides between heads) into keys, values [slots, heads, dim] at slots [T]."""
    assert k.stride(1) == v.stride(1)
    assert keys.stride() == values.stride()
    heads, dim = k.shape[1:]
    _write_kernel[(len(k),)](
        k, v, keys, values, slots, k.stride(0), v.stride(0), k.stride(1), keys.stride(0), keys.stride(1),
        HEADS=heads, MANY=triton.next_power_of_2(heads), DIM=dim, WIDE=triton.next_power_of_2(dim), num_warps=2,
    )  # fmt: skip


@triton.jit
def _prepare_kernel(
    qkv_ptr, cos_ptr, sin_ptr, weight_ptr, eps_ptr, keys_ptr, values_ptr, slots_ptr,
    qkv_token, angle_token, slot_stride, head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SOME: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr,
    NORM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """SOME heads of a token, all of one kind: programs of queries, then of keys, then of values."""
    begin(EARLY)
    wait(EARLY)
    Q_PROGRAMS: tl.constexpr = (HEADS + SOME - 1) // SOME
    K_PROGRAMS: tl.constexpr = (KV_HEADS + SOME - 1) // SOME
    token, program = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kind = (program >= Q_PROGRAMS).to(tl.int32) + (program >= Q_PROGRAMS + K_PROGRAMS).to(tl.int32)
    before = tl.where(kind == 0, 0, Q_PROGRAMS + (kind - 1) * K_PROGRAMS)  # programs of the kinds before
    start = tl.where(kind == 0, 0, HEADS + (kind - 1) * KV_HEADS)  # and their heads
    head = (program - before) * SOME + tl.arange(0, SOME)
    dim = tl.arange(0, WIDE)
    used = (head < tl.where(kind == 0, HEADS, KV_HEADS))[:, None] & (dim < HALF)[None, :]
    place = (start + head)[:, None] * (2 * HALF) + dim[None, :]
    first = qkv_ptr + token * qkv_token + place
    a = tl.load(first, mask=used, other=0.0).to(tl.float32)
    b = tl.load(first + HALF, mask=used, other=0.0).to(tl.float32)
    if kind < 2:
        if NORM:
            inverse = tl.rsqrt(tl.sum(a * a + b * b, 1) / (2 * HALF) + tl.load(eps_ptr))[:, None]
            a *= inverse * tl.load(weight_ptr + place, mask=used, other=0.0)
            b *= inverse * tl.load(weight_ptr + place + HALF, mask=used, other=0.0)
        cos = tl.load(cos_ptr + token * angle_token + dim, mask=dim < HALF, other=0.0).to(tl.float32)[None, :]
        # The second half of the sines is not negated.
        sin = tl.load(sin_ptr + token * angle_token + HALF + dim, mask=dim < HALF, other=0.0).to(tl.float32)[None, :]
        turned = a * cos - b * sin
        b = b * cos + a * sin
        a = turned
    if kind < 2:
        tl.store(first, a.to(qkv_ptr.dtype.element_ty), mask=used)
        tl.store(first + HALF, b.to(qkv_ptr.dtype.element_ty), mask=used)
    if kind > 0:
        pool = keys_ptr if kind == 1 else values_ptr
        slot = pool + tl.load(slots_ptr + token) * slot_stride + head[:, None] * head_stride + dim[None, :]
        tl.store(slot, a.to(keys_ptr.dtype.element_ty), mask=used)
        tl.store(slot + HALF, b.to(keys_ptr.dtype.element_ty), mask=used)


def prepare_qkv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: Norm | None,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """See `ops.qkv.prepare`."""
    kv_heads, dim = keys.shape[1:]
    heads = qkv.shape[1] - 2 * kv_heads
    assert qkv.stride(1) == dim
    assert keys.stride() == values.stride()
    some = min(8, triton.next_power_of_2(kv_heads))
    wide = triton.next_power_of_2(dim // 2)
    weight, eps = (qkv, qkv) if norm is None else (norm.weight, norm.eps)
    _prepare_kernel[(len(qkv), triton.cdiv(heads, some) + 2 * triton.cdiv(kv_heads, some))](
        qkv, cos, sin, weight, eps, keys, values, slots,
        qkv.stride(0), cos.stride(0), keys.stride(0), keys.stride(1),
        HEADS=heads, KV_HEADS=kv_heads, SOME=some, HALF=dim // 2, WIDE=wide, NORM=norm is not None,
        num_warps=max(1, min(4, some * wide // 256)), **launch(qkv),
    )  # fmt: skip


@triton.jit
def _silu_mul_kernel(
    x_ptr, out_ptr, x_token, out_token, SIZE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    begin(EARLY)
    wait(EARLY)
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    used = column < SIZE
    gate = tl.load(x_ptr + token * x_token + column, mask=used, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + token * x_token + SIZE + column, mask=used, other=0.0)
    # Rounded between the two, as the two ops would.
    active = (gate / (1.0 + tl.exp(-gate))).to(x_ptr.dtype.element_ty)
    tl.store(out_ptr + token * out_token + column, (active * up).to(out_ptr.dtype.element_ty), mask=used)


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """x [T, 2n] dense -> silu(x[:, :n]) * x[:, n:] [T, n]."""
    size = x.shape[1] // 2
    out = x.new_empty(len(x), size)
    block = min(1024, triton.next_power_of_2(size))
    _silu_mul_kernel[(len(x), triton.cdiv(size, block))](
        x, out, x.stride(0), out.stride(0), SIZE=size, BLOCK=block, num_warps=4, **launch(x)
    )
    return out


@triton.jit
def _best_of_part_kernel(
    scores_ptr, value_ptr, id_ptr, scores_row, size, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    begin(EARLY)
    wait(EARLY)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(scores_ptr + row * scores_row + column, mask=column < size, other=float("-inf")).to(tl.float32)
    # A NaN would be passed over; an infinity is found out at the end.
    value, index = tl.max(tl.where(x == x, x, float("inf")), 0, return_indices=True)
    where = row * tl.num_programs(1) + part
    tl.store(value_ptr + where, value)
    tl.store(id_ptr + where, part * BLOCK + index)


@triton.jit
def _best_of_row_kernel(
    value_ptr, id_ptr, token_ptr, status_ptr, parts, limit, mark, MANY: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    begin(EARLY)
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, MANY)
    values = tl.load(value_ptr + row * parts + part, mask=part < parts, other=float("-inf"))
    value, index = tl.max(values, 0, return_indices=True)
    sound = tl.abs(value) < limit
    token = tl.load(id_ptr + row * parts + index)
    tl.store(token_ptr + row, tl.where(sound, token, 0).to(tl.int64))
    tl.store(status_ptr + row, tl.where(sound, 0, mark).to(tl.int8))


def best(scores: torch.Tensor, limit: float, mark: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The column of the largest number of each row, the first of equal ones: parts of a row first, then the best part.

    Args:
        scores: [n, V], dense rows.
        limit: a row is unsound if it has a NaN, or if its largest number is not below this in magnitude.

    Returns:
        Columns [n] int64, 0 for unsound rows; [n] int8, 0 for sound rows and `mark` for unsound ones.
    """
    rows, size = scores.shape
    block = 2048
    parts = triton.cdiv(size, block)
    values = torch.empty(rows, parts, dtype=torch.float32, device=scores.device)
    ids = torch.empty(rows, parts, dtype=torch.int32, device=scores.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=scores.device)
    status = torch.empty(rows, dtype=torch.int8, device=scores.device)
    _best_of_part_kernel[(rows, parts)](
        scores, values, ids, scores.stride(0), size, BLOCK=block, num_warps=4, **launch(scores)
    )
    _best_of_row_kernel[(rows,)](
        values, ids, tokens, status, parts, limit, mark, MANY=triton.next_power_of_2(parts), num_warps=1,
        **launch(scores),
    )  # fmt: skip
    return tokens, status
