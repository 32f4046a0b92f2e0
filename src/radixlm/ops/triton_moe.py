"""This module owns the Triton kernels of mixtures of experts, five launches for any number of tokens.

1. `_route_kernel`: softmax, the best experts of each token, and how many of each expert a chunk of tokens asks for.
2. `_place_kernel`: sorts (token, expert) pairs, called entries, by expert; an expert's entries fill whole blocks.
3. `_grouped_kernel` with gates: silu(gate) * up for each entry, [entries, inner].
4. `_grouped_kernel` without: down, times the weight of the expert, [entries, hidden].
5. `_sum_kernel`: the parts of each token, in the order of its experts, and the residual.

Nothing is read back and every size follows from the number of tokens, so a CUDA graph can hold it: there are as many
blocks as could be needed, and those that are not have size 0. There are no atomics: the order of entries and of every
sum is fixed. The torch form is `ops.moe.GroupedMixture`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixlm.ops.grouped import LIMIT, Shape, Tiles, Way, blocks
from radixlm.ops.triton_early import begin, launch, wait

#: Entries of a chunk at most: `_place_kernel` compares each of them with each.
CHUNK = 128


@triton.jit(do_not_specialize=["tokens"])
def _route_kernel(
    scores_ptr, expert_ptr, weight_ptr, count_ptr, tokens, scores_token,
    EXPERTS: tl.constexpr, WIDE: tl.constexpr, ACTIVE: tl.constexpr, MANY: tl.constexpr, SOME: tl.constexpr,
    RENORMALISE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """SOME tokens. WIDE and MANY are EXPERTS and ACTIVE, rounded up to a power of two."""
    begin(EARLY)
    wait(EARLY)
    token = tl.program_id(0).to(tl.int64) * SOME + tl.arange(0, SOME)
    here = token < tokens
    column = tl.arange(0, WIDE)[None, :]
    real = here[:, None] & (column < EXPERTS)
    scores = tl.load(scores_ptr + token[:, None] * scores_token + column, mask=real, other=0.0).to(tl.float32)
    scores = tl.where(column < EXPERTS, scores, float("-inf"))
    mass = tl.exp(scores - tl.max(scores, 1)[:, None])
    # What chooses is finite wherever there is an expert, so that no token goes to one that does not exist. A NaN stays
    # in the weights.
    left = tl.where(scores == scores, tl.maximum(scores, -1e38), -1e38)
    left = tl.where(column < EXPERTS, left, float("-inf"))
    counts = tl.zeros([WIDE], tl.int32)
    which = tl.arange(0, MANY)[None, :]
    best = tl.zeros([SOME, MANY], tl.int32)
    weights = tl.zeros([SOME, MANY], tl.float32)
    for j in tl.range(0, ACTIVE):  # unrolled it would take the compiler half a minute
        _, index = tl.max(left, 1, return_indices=True)
        picked = column == index[:, None]
        counts += tl.sum((picked & here[:, None]).to(tl.int32), 0)
        left = tl.where(picked, float("-inf"), left)
        best = tl.where(which == j, index[:, None], best)
        weights = tl.where(which == j, tl.sum(tl.where(picked, mass, 0.0), 1)[:, None], weights)
    if RENORMALISE:
        weights = weights / tl.sum(weights, 1)[:, None]
    else:
        weights = weights / tl.sum(mass, 1)[:, None]
    used = here[:, None] & (which < ACTIVE)
    tl.store(expert_ptr + token[:, None] * ACTIVE + which, best, mask=used)
    tl.store(weight_ptr + token[:, None] * ACTIVE + which, weights, mask=used)
    tl.store(count_ptr + tl.program_id(0) * WIDE + tl.arange(0, WIDE), counts)


@triton.jit(do_not_specialize=["entries", "chunks", "blocks", "share"])
def _place_kernel(
    expert_ptr, count_ptr, order_ptr, owner_ptr, size_ptr, entries, chunks, blocks, share,
    WIDE: tl.constexpr, CHUNK: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """The entries of one chunk, and `share` of the blocks. ROOM is CHUNK, rounded up to a power of two.

    Every program adds up the counts of all chunks; those of the chunks before it say where its own entries go.
    """
    begin(EARLY)
    wait(EARLY)
    chunk = tl.program_id(0)
    column = tl.arange(0, WIDE)
    total = tl.zeros([WIDE], tl.int32)
    before = tl.zeros([WIDE], tl.int32)
    for first in tl.range(0, chunks, PARTS):
        part = first + tl.arange(0, PARTS)[:, None]
        counts = tl.load(count_ptr + part * WIDE + column[None, :], mask=part < chunks, other=0)
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where(part < chunk, counts, 0), 0)
    needed = (total + BLOCK - 1) // BLOCK
    end = tl.cumsum(needed, 0)
    start = end - needed

    mine = tl.arange(0, ROOM)
    entry = chunk * CHUNK + mine
    valid = (mine < CHUNK) & (entry < entries)
    expert = tl.load(expert_ptr + entry, mask=valid, other=-1)
    # Read again instead of turned: [None, :] wants other threads to hold it.
    its = tl.arange(0, ROOM)
    others = tl.load(expert_ptr + chunk * CHUNK + its, mask=(its < CHUNK) & (chunk * CHUNK + its < entries), other=-1)
    rank = tl.sum(((expert[:, None] == others[None, :]) & (its[None, :] < mine[:, None])).to(tl.int32), 1)
    place = tl.where(expert[:, None] == column[None, :], (start * BLOCK + before)[None, :], 0)
    tl.store(order_ptr + tl.sum(place, 1) + rank, entry, mask=valid)

    for first in tl.range(0, share, 16):
        index = first + tl.arange(0, 16)
        block = chunk * share + index
        owner = tl.sum((end[None, :] <= block[:, None]).to(tl.int32), 1)  # WIDE if nobody needs it
        rest = tl.where(owner[:, None] == column[None, :], (total + start * BLOCK)[None, :], 0)
        size = tl.minimum(tl.maximum(tl.sum(rest, 1) - block * BLOCK, 0), BLOCK)
        kept = (index < share) & (block < blocks)
        tl.store(owner_ptr + block, tl.where(size > 0, owner, 0), mask=kept)
        tl.store(size_ptr + block, size, mask=kept)


@triton.jit
def _activated(x, KIND: tl.constexpr):
    """See `ops.activation`; KIND is a name from there."""
    if KIND == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif KIND == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_pytorch_tanh":
        y = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        tl.static_assert(KIND == "relu")
        y = tl.maximum(x, 0.0)
    return y


@triton.jit
def _grouped_kernel(
    x_ptr, w_ptr, weight_ptr, out_ptr, order_ptr, owner_ptr, size_ptr, x_row,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, PER_ROW: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One block of entries with ROWS rows of their expert's weight (and as many of up). PER_ROW entries share an x row.

    The weight is the left operand: tiles of the matrix units are large on that side and can be small on the other.
    """
    begin(EARLY)
    wait(EARLY)
    block = tl.program_id(0)
    size = tl.load(size_ptr + block)
    if size == 0:
        return
    index = tl.arange(0, TOKENS)
    here = index < size
    entry = tl.load(order_ptr + block * TOKENS + index, mask=here, other=0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    mine = w_ptr + tl.load(owner_ptr + block).to(tl.int64) * ((1 + GATED) * OUTPUTS * INPUTS)
    mine_up = mine + OUTPUTS * INPUTS
    # Within an expert's weight, and within x and out, 32 bits are enough: see `grouped.LIMIT`.
    x = (entry // PER_ROW)[None, :] * x_row + column[:, None]
    w = row[:, None] * INPUTS + column[None, :]
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    acc_up = tl.zeros([ROWS, TOKENS], tl.float32)
    for k in tl.range(0, INPUTS, COLUMNS, num_stages=STAGES):
        if EVEN:
            b = tl.load(x_ptr + k + x, mask=here[None, :], other=0.0)
            a = tl.load(mine + k + w)
        else:
            inside = k + column < INPUTS
            kept = inside[None, :] & (row < OUTPUTS)[:, None]
            b = tl.load(x_ptr + k + x, mask=inside[:, None] & here[None, :], other=0.0)
            a = tl.load(mine + k + w, mask=kept, other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        if GATED:
            if EVEN:
                c = tl.load(mine_up + k + w)
            else:
                c = tl.load(mine_up + k + w, mask=kept, other=0.0)
            acc_up = tl.dot(c, b, acc_up, input_precision=PRECISION)
    if GATED:
        y = _activated(acc, KIND) * acc_up
    else:
        y = acc * tl.load(weight_ptr + entry, mask=here, other=0.0)[None, :]
    used = here[None, :] if EVEN else here[None, :] & (row < OUTPUTS)[:, None]
    tl.store(out_ptr + entry[None, :] * OUTPUTS + row[:, None], y.to(out_ptr.dtype.element_ty), mask=used)


@triton.jit
def _sum_kernel(
    part_ptr, residual_ptr, out_ptr, residual_token, out_token,
    SIZE: tl.constexpr, ACTIVE: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    wait(EARLY)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    used = column < SIZE
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(ACTIVE):
        total += tl.load(part_ptr + (token * ACTIVE + j) * SIZE + column, mask=used, other=0.0).to(tl.float32)
    if ADD:
        total += tl.load(residual_ptr + token * residual_token + column, mask=used, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * out_token + column, total.to(out_ptr.dtype.element_ty), mask=used)


def mixture(
    x: torch.Tensor,
    scores: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    way: Way,
    *,
    active: int,
    renormalise: bool,
    activation: str,
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [T, hidden], T > 0, through the `active` best experts of each token -> [T, hidden].

    Args:
        x: dense rows.
        scores: [T, experts] of the router, before the softmax. Of equal ones the first expert counts as best.
        gate_up: [experts, 2 * inner, hidden]: gate rows, then up rows.
        down: [experts, hidden, inner].
        renormalise: the weights of a token's experts are made to sum to 1.
        activation: a name of `ops.activation`.
        into: the result is added to this tensor, which is returned.
    """
    tokens, hidden = x.shape
    experts, inner = len(gate_up), gate_up.shape[1] // 2
    shape = Shape(experts, active, hidden, inner)
    routed = route(scores, active, renormalise)
    order, owners, sizes = place(routed, shape, way.tokens)
    entries = tokens * active
    assert max(entries * max(inner, hidden), 2 * inner * hidden) < LIMIT
    middle = x.new_empty(entries, inner)
    _grouped(x, gate_up, None, middle, (order, owners, sizes), way.tokens, way.gate_up, active, activation)
    parts = x.new_empty(entries, hidden)
    _grouped(middle, down, routed.weights, parts, (order, owners, sizes), way.tokens, way.down, 1, None)
    out = x.new_empty(x.shape) if into is None else into
    block = min(1024, triton.next_power_of_2(hidden))
    _sum_kernel[(tokens, triton.cdiv(hidden, block))](
        parts, out, out, out.stride(0), out.stride(0), SIZE=hidden, ACTIVE=active, BLOCK=block, ADD=into is not None,
        num_warps=4, **launch(x),
    )  # fmt: skip
    return out


class Routed:
    """What `_route_kernel` finds.

    Attributes:
        experts: [T, active] int32, best first.
        weights: [T, active] float32.
        counts: [chunks, experts rounded up] int32: entries of each expert in each chunk of `step` tokens.
    """

    __slots__ = ("counts", "experts", "step", "weights")

    def __init__(self, tokens: int, experts: int, active: int, device: torch.device) -> None:
        self.step = 1 << ((CHUNK // active).bit_length() - 1) if active <= CHUNK else 1
        chunks = triton.cdiv(tokens, self.step)
        self.experts = torch.empty(tokens, active, dtype=torch.int32, device=device)
        self.weights = torch.empty(tokens, active, dtype=torch.float32, device=device)
        self.counts = torch.empty(chunks, triton.next_power_of_2(experts), dtype=torch.int32, device=device)


def route(scores: torch.Tensor, active: int, renormalise: bool) -> Routed:
    """See `ops.moe.route`."""
    tokens, experts = scores.shape
    routed = Routed(tokens, experts, active, scores.device)
    chunks, wide = routed.counts.shape
    _route_kernel[(chunks,)](
        scores, routed.experts, routed.weights, routed.counts, tokens, scores.stride(0),
        EXPERTS=experts, WIDE=wide, ACTIVE=active, MANY=triton.next_power_of_2(active), SOME=routed.step,
        RENORMALISE=renormalise, num_warps=4, **launch(scores),
    )  # fmt: skip
    return routed


def place(routed: Routed, shape: Shape, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Entries, numbered token * active + choice, in blocks of `size` that belong to one expert each.

    Returns:
        Entries [blocks * size] in their blocks, undefined where a block is not full; the expert of each block [blocks]
        and how many entries it has (0 for those that are not needed), all int32.
    """
    entries = routed.experts.numel()
    chunks, wide = routed.counts.shape
    count = blocks(entries, shape.experts, size)
    made = routed.experts.new_empty(count * size + 2 * count)
    order, owners, sizes = torch.split(made, [count * size, count, count])
    chunk = routed.step * shape.active
    _place_kernel[(chunks,)](
        routed.experts, routed.counts, order, owners, sizes, entries, chunks, count, triton.cdiv(count, chunks),
        WIDE=wide, CHUNK=chunk, ROOM=triton.next_power_of_2(chunk), BLOCK=size, PARTS=32, num_warps=8,
        **launch(order),
    )  # fmt: skip
    return order, owners, sizes


def _grouped(
    x: torch.Tensor,
    w: torch.Tensor,
    weights: torch.Tensor | None,
    out: torch.Tensor,
    placed: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    tokens: int,
    tiles: Tiles,
    per_row: int,
    activation: str | None,
) -> None:
    """One of the two products: with gates if there is an activation, else with weights."""
    order, owners, sizes = placed
    inputs, outputs = w.shape[2], out.shape[1]
    _grouped_kernel[(len(sizes), triton.cdiv(outputs, tiles.rows))](
        x, w, out if weights is None else weights, out, order, owners, sizes, x.stride(0),
        OUTPUTS=outputs, INPUTS=inputs, PER_ROW=per_row, TOKENS=tokens, ROWS=tiles.rows, COLUMNS=tiles.columns,
        STAGES=tiles.stages, EVEN=inputs % tiles.columns == 0 and outputs % tiles.rows == 0,
        GATED=activation is not None, KIND=activation, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tiles.warps, **launch(x),
    )  # fmt: skip
