"""This module owns the Triton kernels of thin matrix products: few tokens times a weight, which is read exactly once.

Such a product is bound by reading the weight. `_vector_kernel` multiplies on the ordinary units, every thread with 16
bytes of several rows in flight; `_tiles_kernel` uses the matrix units, with the weight as the left operand, since their
tiles are large on that side and small on the other. Sums are in float32 and their order is fixed, so results repeat.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixlm.ops.thin import Vector, Way
from radixlm.ops.triton_early import begin, fetch, launch, wait


@triton.jit
def _start(
    w, w_up, SIZE: tl.constexpr, GATED: tl.constexpr, FETCH: tl.constexpr, WARPS: tl.constexpr, EARLY: tl.constexpr
):
    """Weights never change: an early kernel asks for its part, SIZE numbers of 16 bits, before it waits."""
    begin(EARLY)
    if EARLY and FETCH and SIZE % (256 * WARPS) == 0:  # 16 bytes or a multiple for each thread
        fetch(w, 2 * SIZE, 32 * WARPS)
        if GATED:
            fetch(w_up, 2 * SIZE, 32 * WARPS)
    wait(EARLY)


@triton.jit
def _finish(
    y, up, row, token, used, bias_ptr, out_ptr, outputs, out_token,
    GATED: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Bias, then silu(y) * up, then y plus what `out` holds, and one rounding. row, token broadcast to y's shape."""
    if BIAS:
        y += tl.load(bias_ptr + row, mask=row < outputs, other=0.0)
        if GATED:
            up += tl.load(bias_ptr + outputs + row, mask=row < outputs, other=0.0)
    if GATED:
        y = y / (1.0 + tl.exp(-y)) * up
    out = out_ptr + token * out_token + row
    if ADD:
        y += tl.load(out, mask=used, other=0.0)
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=used)


@triton.jit
def _fold(p, TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums of 8 neighbours, which one thread holds: an eighth of the accumulators."""
    return tl.sum(tl.reshape(p, [TOKENS, ROWS, COLUMNS // 8, 8]), 3)


@triton.jit(do_not_specialize=["tokens", "outputs"])
def _vector_kernel(
    x_ptr, w_ptr, bias_ptr, gain_ptr, eps_ptr, out_ptr, tokens, outputs, x_token, out_token,
    INPUTS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNROLL: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
    ADD: tl.constexpr, WARPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """ROWS rows of the weight (and as many of `up`) with all tokens. The tensors are [tokens, rows, columns]."""
    first = tl.program_id(0) * ROWS
    token = tl.arange(0, TOKENS)[:, None, None]
    row = tl.arange(0, ROWS)[None, :, None]
    column = tl.arange(0, COLUMNS)[None, None, :]
    mine = w_ptr + first.to(tl.int64) * INPUTS
    mine_up = mine + outputs.to(tl.int64) * INPUTS
    _start(mine, mine_up, ROWS * INPUTS, GATED, EVEN, WARPS, EARLY)
    x = x_ptr + token * x_token + column
    w = mine + row * INPUTS + column
    w_up = mine_up + row * INPUTS + column
    acc = tl.zeros([TOKENS, ROWS, COLUMNS // 8], tl.float32)
    acc_up = tl.zeros([TOKENS, ROWS, COLUMNS // 8], tl.float32)
    squares = tl.zeros([TOKENS, 1, COLUMNS // 8], tl.float32)
    for k in tl.range(0, INPUTS, COLUMNS, num_stages=STAGES, loop_unroll_factor=UNROLL):
        here = (k + column < INPUTS) if not EVEN else (column >= 0)
        kept = here & (first + row < outputs)
        # A weight is read once a step: it should not push out what is read again.
        if EVEN:
            a = tl.load(w + k, eviction_policy="evict_first")
        else:
            a = tl.load(w + k, mask=kept, other=0.0, eviction_policy="evict_first")
        b = tl.load(x + k, mask=here & (token < tokens), other=0.0).to(tl.float32)
        if NORM:
            squares += _fold(b * b, TOKENS, 1, COLUMNS)
            b *= tl.load(gain_ptr + k + column, mask=here, other=0.0).to(tl.float32)
        acc += _fold(a.to(tl.float32) * b, TOKENS, ROWS, COLUMNS)
        if GATED:
            if EVEN:
                c = tl.load(w_up + k, eviction_policy="evict_first")
            else:
                c = tl.load(w_up + k, mask=kept, other=0.0, eviction_policy="evict_first")
            acc_up += _fold(c.to(tl.float32) * b, TOKENS, ROWS, COLUMNS)
    y, up = tl.sum(acc, 2), tl.sum(acc_up, 2)
    if NORM:
        # The root is one number a token, so it may be multiplied by at the end.
        inverse = tl.rsqrt(tl.sum(squares, 2) / INPUTS + tl.load(eps_ptr))
        y *= inverse
        up *= inverse
    token = tl.arange(0, TOKENS)[:, None]
    row = first + tl.arange(0, ROWS)[None, :]
    used = (token < tokens) & (row < outputs)
    _finish(y, up, row, token, used, bias_ptr, out_ptr, outputs, out_token, GATED, BIAS, ADD)


@triton.jit(do_not_specialize=["tokens", "outputs"])
def _tiles_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, part_ptr, count_ptr, tokens, outputs, x_token, out_token,
    INPUTS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
    WARPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """ROWS rows of the weight (and as many of `up`) with all tokens, over one of SPLIT parts of the columns.

    The program that finishes a tile last adds the parts up, in their order.
    """
    tile, part = tl.program_id(0), tl.program_id(1)
    first = tile * ROWS
    token = tl.arange(0, TOKENS)[None, :]
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)
    EACH: tl.constexpr = (INPUTS + SPLIT * COLUMNS - 1) // (SPLIT * COLUMNS) * COLUMNS
    low = part * EACH
    high = tl.minimum(low + EACH, INPUTS)
    mine = w_ptr + first.to(tl.int64) * INPUTS
    mine_up = mine + outputs.to(tl.int64) * INPUTS
    _start(mine, mine_up, ROWS * INPUTS, GATED, EVEN and SPLIT == 1, WARPS, EARLY)
    x = x_ptr + token * x_token + column[:, None]
    w = mine + row * INPUTS + column[None, :]
    w_up = mine_up + row * INPUTS + column[None, :]
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    acc_up = tl.zeros([ROWS, TOKENS], tl.float32)
    for k in tl.range(low, high, COLUMNS, num_stages=STAGES):
        if EVEN:
            a = tl.load(w + k, eviction_policy="evict_first")
            b = tl.load(x + k, mask=token < tokens, other=0.0)
        else:
            here = k + column < INPUTS
            kept = here[None, :] & (first + row < outputs)
            a = tl.load(w + k, mask=kept, other=0.0, eviction_policy="evict_first")
            b = tl.load(x + k, mask=here[:, None] & (token < tokens), other=0.0)
        acc = tl.dot(a, b, acc)
        if GATED:
            if EVEN:
                c = tl.load(w_up + k, eviction_policy="evict_first")
            else:
                c = tl.load(w_up + k, mask=kept, other=0.0, eviction_policy="evict_first")
            acc_up = tl.dot(c, b, acc_up)
    used = (token < tokens) & (first + row < outputs)
    if SPLIT == 1:
        _finish(acc, acc_up, first + row, token, used, bias_ptr, out_ptr, outputs, out_token, GATED, BIAS, ADD)
    else:
        SIZE: tl.constexpr = ROWS * TOKENS
        parts = part_ptr + tile * (SPLIT * SIZE) + row * TOKENS + token
        tl.store(parts + part * SIZE, acc)
        # All threads' stores before the count, the count before the last one's loads.
        tl.debug_barrier()
        if tl.atomic_add(count_ptr + tile, 1, sem="acq_rel") == SPLIT - 1:
            total = tl.zeros([ROWS, TOKENS], tl.float32)
            for each in tl.static_range(SPLIT):
                total += tl.load(parts + each * SIZE, cache_modifier=".cg")
            tl.store(count_ptr + tile, 0)  # for the next launch
            _finish(total, acc_up, first + row, token, used, bias_ptr, out_ptr, outputs, out_token, False, BIAS, ADD)


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    way: Way,
    *,
    bias: torch.Tensor | None = None,
    gain: torch.Tensor | None = None,
    eps: torch.Tensor | None = None,
    gated: bool = False,
    into: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [T, in] times weight [out, in] -> [T, out], rounded once, whatever is fused.

    Args:
        x, weight: dense rows.
        way: its `tokens` must be at least T.
        gain, eps: x is normalised first with these as weight [in] and float32 epsilon [1] (`Vector` only). A gain of
            x's dtype is best: numbers of another size lie in other threads than the weight they meet.
        gated: weight holds gate rows, then as many of up: the result is silu(gate) * up, [T, out / 2].
        into: the product is added to this tensor, which is returned.
        counts: int32, zero, one for each tile of rows: needed where `way` splits. Zero again afterwards; not to be
            shared by products that run at the same time.
    """
    inputs = weight.shape[1]
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    out = x.new_empty(len(x), outputs) if into is None else into
    even = inputs % way.columns == 0 and outputs % way.rows == 0
    programs = triton.cdiv(outputs, way.rows)
    unused = out  # in place of a tensor that a kernel will not touch
    if isinstance(way, Vector):
        _vector_kernel[(programs,)](
            x, weight, unused if bias is None else bias, unused if gain is None else gain,
            unused if eps is None else eps, out, len(x), outputs, x.stride(0), out.stride(0),
            INPUTS=inputs, TOKENS=way.tokens, ROWS=way.rows, COLUMNS=way.columns, UNROLL=way.unroll, STAGES=way.stages,
            EVEN=even, GATED=gated, NORM=gain is not None, BIAS=bias is not None, ADD=into is not None,
            WARPS=way.warps, num_warps=way.warps, **launch(x),
        )  # fmt: skip
        return out
    assert gain is None
    assert not gated or way.split == 1
    split = way.split
    parts = unused if split == 1 else x.new_empty(programs * split * way.rows * way.tokens, dtype=torch.float32)
    _tiles_kernel[(programs, split)](
        x, weight, unused if bias is None else bias, out, parts, unused if counts is None else counts,
        len(x), outputs, x.stride(0), out.stride(0),
        INPUTS=inputs, TOKENS=way.tokens, ROWS=way.rows, COLUMNS=way.columns, SPLIT=split, STAGES=way.stages,
        EVEN=even and inputs % (split * way.columns) == 0, GATED=gated, BIAS=bias is not None, ADD=into is not None,
        WARPS=way.warps, num_warps=way.warps, **launch(x),
    )  # fmt: skip
    return out
