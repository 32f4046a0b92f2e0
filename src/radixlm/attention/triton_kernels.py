"""This module owns the Triton kernels of attention: extend, decode with split KV, prefixes that rows share, merging.

All follow FlashAttention (Dao et al., 2022: online softmax over blocks of keys) with the query heads that share a key
head as rows of one tile (grouped queries). Decode splits a long context over several programs and merges their partial
results by log-sum-exp (Dao et al., Flash-Decoding, 2023). A prefix that rows share is read once for all of them, and is
one more part of each (Juravsky et al., Hydragen, 2024). Keys and values are gathered through the page table, token by
token, so any page size will do.

Partial results are numbered: first those of the rows' own contexts, at (token * heads + head) * splits + split, then
those of shared prefixes, at own + number * heads + head (see `SharedTiles`), where `own` is how many the first are.
Each is a vector of `head_dim` float32, and the log2 of the sum of its weights.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _absorb(
    q, top, total, acc, k_ptr, v_ptr, table_ptr, n, end, limit, first, kv_slot, scale,
    DIM: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr,
    PARTLY: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take the keys and values at positions [n, n + BLOCK) of one row and head into the running softmax of a tile of
    queries [rows, WIDE]: `top` and `total` [rows], the largest score (in units of log2) and the sum of weights, and
    `acc` [rows, WIDE], the weighted sum of values.

    PARTLY: not every query sees every one of these positions. It sees those before `end` and, if CAUSAL, from `first`
    to `limit` [rows].
    """
    position = n + tl.arange(0, BLOCK)
    dim = tl.arange(0, WIDE)
    # Where everything is there, loads without a mask are cheaper.
    if PARTLY:
        there = position < end
        page = tl.load(table_ptr + position // PAGE, mask=there, other=0).to(tl.int64)
    else:
        page = tl.load(table_ptr + position // PAGE).to(tl.int64)
    place = (page * PAGE + position % PAGE) * kv_slot
    k_at, v_at = k_ptr + place[None, :] + dim[:, None], v_ptr + place[:, None] + dim[None, :]
    if PARTLY:
        k = tl.load(k_at, mask=there[None, :] & (dim < DIM)[:, None], other=0.0)
    elif DIM < WIDE:
        k = tl.load(k_at, mask=(dim < DIM)[:, None], other=0.0)
    else:
        k = tl.load(k_at)
    s = tl.dot(q, k.to(q.dtype), input_precision=PRECISION) * scale
    if CAP > 0:
        # tanh by exp: s is in units of log2, the cap is not.
        e = tl.exp2(s * (2.0 / CAP))
        s = CAP * 1.4426950408889634 * (1.0 - 2.0 / (e + 1.0))
    if PARTLY:
        if CAUSAL:
            visible = (position[None, :] <= limit[:, None]) & there[None, :]
            if WINDOW > 0:
                visible = visible & (position[None, :] >= first[:, None])
        else:
            visible = there[None, :]
        s = tl.where(visible, s, float("-inf"))
    new = tl.maximum(top, tl.max(s, 1))
    base = new
    if PARTLY and WINDOW > 0:
        # A row whose window starts behind this block has seen nothing yet.
        base = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(s - base[:, None])
    shrink = tl.exp2(top - base)
    if PARTLY:
        v = tl.load(v_at, mask=there[:, None] & (dim < DIM)[None, :], other=0.0)
    elif DIM < WIDE:
        v = tl.load(v_at, mask=(dim < DIM)[None, :], other=0.0)
    else:
        v = tl.load(v_at)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * shrink[:, None], input_precision=PRECISION)
    return new, total, acc


@triton.jit(do_not_specialize=["splits"])
def decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, part_ptr, lse_ptr, table_ptr, rows_ptr, positions_ptr, shares_ptr,
    q_token, q_head, kv_slot, kv_head, out_token, table_row, splits,
    scale,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, SHARED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One row, one key head, one of `splits` parts of its context; with SHARED, of what lies behind the shared prefix.
    WHOLE: there is but this part, and the result is final.
    """
    token, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(rows_ptr + token)
    last = tl.load(positions_ptr + token).to(tl.int32)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(last - WINDOW + 1, 0)
    if SHARED:
        begin = tl.load(shares_ptr + token * 4)
    each = tl.cdiv(tl.cdiv(last + 1 - begin, splits), BLOCK) * BLOCK
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
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDE], tl.float32)
    k_ptr += head.to(tl.int64) * kv_head
    v_ptr += head.to(tl.int64) * kv_head
    table_ptr += row * table_row
    whole = low + tl.maximum(high - low, 0) // BLOCK * BLOCK
    for n in range(low, whole, BLOCK):
        top, total, acc = _absorb(
            q, top, total, acc, k_ptr, v_ptr, table_ptr, n, high, 0, 0, kv_slot, scale,
            DIM, WIDE, PAGE, CAP, BLOCK, False, False, 0, PRECISION,
        )  # fmt: skip
    if whole < high:
        top, total, acc = _absorb(
            q, top, total, acc, k_ptr, v_ptr, table_ptr, whole, high, 0, 0, kv_slot, scale,
            DIM, WIDE, PAGE, CAP, BLOCK, True, False, 0, PRECISION,
        )  # fmt: skip
    stored = (group < GROUP)[:, None] & (dim < DIM)[None, :]
    if WHOLE:
        out = out_ptr + token * out_token + heads[:, None] * DIM + dim[None, :]
        tl.store(out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=stored)
    else:
        # A part that has no positions (its top is -inf) has weight 0 in the merge.
        total = tl.where(total > 0, total, 1.0)
        part = (token * tl.num_programs(1) * GROUP + heads) * splits + split
        tl.store(part_ptr + part[:, None] * DIM + dim[None, :], acc / total[:, None], mask=stored)
        tl.store(lse_ptr + part, top + tl.log2(total), mask=group < GROUP)


@triton.jit(do_not_specialize=["own"])
def shared_kernel(
    q_ptr, k_ptr, v_ptr, part_ptr, lse_ptr, table_ptr, rows_ptr, members_ptr, pieces_ptr, own,
    q_token, q_head, kv_slot, kv_head, table_row,
    scale,
    GROUP: tl.constexpr, MEMBERS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    PAGE: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One piece of a prefix, one key head: the queries of all rows of its tile, MEMBERS * GROUP of ROWS."""
    head, piece = tl.program_id(0), tl.program_id(1)
    low = tl.load(pieces_ptr + piece * 3)
    high = tl.load(pieces_ptr + piece * 3 + 1)
    if low >= high:
        return
    number = tl.load(pieces_ptr + piece * 3 + 2)
    row = tl.load(rows_ptr + tl.load(members_ptr + piece * MEMBERS))  # every member's pages are the same here

    m = tl.arange(0, ROWS)
    dim = tl.arange(0, WIDE)
    of = m // GROUP
    token = tl.load(members_ptr + piece * MEMBERS + of, mask=of < MEMBERS, other=-1)
    heads = head * GROUP + m % GROUP
    used = (token >= 0)[:, None] & (dim < DIM)[None, :]
    q = tl.load(q_ptr + token[:, None] * q_token + heads[:, None] * q_head + dim[None, :], mask=used, other=0.0)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDE], tl.float32)
    k_ptr += head.to(tl.int64) * kv_head
    v_ptr += head.to(tl.int64) * kv_head
    table_ptr += row * table_row
    whole = low + (high - low) // BLOCK * BLOCK
    for n in range(low, whole, BLOCK):
        top, total, acc = _absorb(
            q, top, total, acc, k_ptr, v_ptr, table_ptr, n, high, 0, 0, kv_slot, scale,
            DIM, WIDE, PAGE, CAP, BLOCK, False, False, 0, PRECISION,
        )  # fmt: skip
    if whole < high:
        top, total, acc = _absorb(
            q, top, total, acc, k_ptr, v_ptr, table_ptr, whole, high, 0, 0, kv_slot, scale,
            DIM, WIDE, PAGE, CAP, BLOCK, True, False, 0, PRECISION,
        )  # fmt: skip
    part = own + (number + of) * (tl.num_programs(0) * GROUP) + heads
    tl.store(part_ptr + part[:, None].to(tl.int64) * DIM + dim[None, :], acc / total[:, None], mask=used)
    tl.store(lse_ptr + part, top + tl.log2(total), mask=token >= 0)


@triton.jit(do_not_specialize=["own", "splits"])
def merge_kernel(
    part_ptr, lse_ptr, out_ptr, shares_ptr, own, splits, out_token, DIM: tl.constexpr, WIDE: tl.constexpr,
    MANY: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """The parts of one row and one query head, weighted by the exponentials of their log-sum-exps, MANY at a time."""
    token, head = tl.program_id(0), tl.program_id(1)
    heads = tl.num_programs(1)
    begin = (token * heads + head) * splits
    parts = splits
    if SHARED:
        number = tl.load(shares_ptr + token * 4 + 1)
        parts = splits + tl.load(shares_ptr + token * 4 + 2)
        step = tl.load(shares_ptr + token * 4 + 3)
    dim = tl.arange(0, WIDE)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([WIDE], tl.float32)
    for n in range(0, parts, MANY):
        i = n + tl.arange(0, MANY)
        part = begin + i
        if SHARED:
            part = tl.where(i < splits, part, own + (number + (i - splits) * step) * heads + head)
        lse = tl.load(lse_ptr + part, mask=i < parts, other=float("-inf"))
        # The first part of a row is never empty: it holds the current token, or all of a short context.
        new = tl.maximum(top, tl.max(lse, 0))
        weight = tl.exp2(lse - new)
        shrink = tl.exp2(top - new)
        value = tl.load(
            part_ptr + part[:, None].to(tl.int64) * DIM + dim[None, :],
            mask=(i < parts)[:, None] & (dim < DIM)[None, :],
            other=0.0,
        )
        total = total * shrink + tl.sum(weight, 0)
        acc = acc * shrink + tl.sum(value * weight[:, None], 0)
        top = new
    tl.store(out_ptr + token * out_token + head * DIM + dim, (acc / total).to(out_ptr.dtype.element_ty), mask=dim < DIM)


@triton.jit
def extend_kernel(
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
    end = start + count
    begin = 0
    whole = (start + 1) // BLOCK * BLOCK  # every query sees every position before this one
    if WINDOW > 0:
        first = tl.maximum(limit - WINDOW + 1, 0)
        begin = tl.maximum(start - WINDOW + 1, 0) // BLOCK * BLOCK
        whole = begin

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDE], tl.float32)
    k_ptr += head.to(tl.int64) * kv_head
    v_ptr += head.to(tl.int64) * kv_head
    table_ptr += row * table_row
    for n in range(begin, whole, BLOCK):
        top, total, acc = _absorb(
            q, top, total, acc, k_ptr, v_ptr, table_ptr, n, end, limit, first, kv_slot, scale,
            DIM, WIDE, PAGE, CAP, BLOCK, False, True, WINDOW, PRECISION,
        )  # fmt: skip
    for n in range(whole, end, BLOCK):
        top, total, acc = _absorb(
            q, top, total, acc, k_ptr, v_ptr, table_ptr, n, end, limit, first, kv_slot, scale,
            DIM, WIDE, PAGE, CAP, BLOCK, True, True, WINDOW, PRECISION,
        )  # fmt: skip
    out = out_ptr + (token0 + of)[:, None] * out_token + heads[:, None] * DIM + dim[None, :]
    tl.store(out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=here)
