"""This module owns the Triton kernel of products whose sums have one order, whatever the number of tokens.

A library chooses another kernel for another number of tokens, with another order of sums: then a token's result depends
on who is computed beside it (He et al., "Defeating Nondeterminism in LLM Inference", 2025). Here each result is one
chain of sums along the columns, DEPTH at a time on the matrix units, never split. The tiles may be of any shape around
it: that decides who computes a number, not how.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

#: Columns that are multiplied at once. Part of what a result is: the same for every shape.
DEPTH = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """A tile: so many tokens and so many rows of the weight. Of tokens no fewer than 64, which the matrix units take as
    they are; fewer would go through other instructions.
    """

    tokens: int
    rows: int
    warps: int
    stages: int


FEW = Shape(64, 32, 4, 5)
MANY = Shape(128, 128, 8, 3)
#: float32 takes twice the room, and is computed without matrix units.
WIDE = Shape(64, 32, 4, 2)
#: From so many tokens on the larger tile is faster.
ENOUGH = 128


@triton.jit(do_not_specialize=["tokens", "outputs"])
def _fixed_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, tokens, outputs, x_token, out_token,
    INPUTS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BIAS: tl.constexpr,
    GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens with ROWS rows of the weight. Programs that start together share tokens or rows, for the cache."""
    program = tl.program_id(0)
    tall, wide = tl.cdiv(tokens, TOKENS), tl.cdiv(outputs, ROWS)
    band = program // (GROUP * wide) * GROUP
    height = tl.minimum(tall - band, GROUP)
    inside = program % (GROUP * wide)
    token = (band + inside % height) * TOKENS + tl.arange(0, TOKENS)
    row = inside // height * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    x = x_ptr + token[:, None].to(tl.int64) * x_token + column[None, :]
    w = w_ptr + row[None, :].to(tl.int64) * INPUTS + column[:, None]
    acc = tl.zeros([TOKENS, ROWS], tl.float32)
    for k in range(0, INPUTS, COLUMNS):
        here = k + column < INPUTS
        a = tl.load(x + k, mask=(token < tokens)[:, None] & here[None, :], other=0.0)
        b = tl.load(w + k, mask=(row < outputs)[None, :] & here[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    if BIAS:
        acc += tl.load(bias_ptr + row, mask=row < outputs, other=0.0).to(tl.float32)[None, :]
    out = out_ptr + token[:, None].to(tl.int64) * out_token + row[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(token < tokens)[:, None] & (row < outputs)[None, :])


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, shape: Shape | None = None
) -> torch.Tensor:
    """x [T, in] times weight [out, in], plus bias [out] -> [T, out]. Dense rows."""
    tokens, outputs = len(x), len(weight)
    out = x.new_empty(tokens, outputs)
    if shape is None:
        shape = WIDE if x.element_size() > 2 else MANY if tokens >= ENOUGH else FEW
    programs = triton.cdiv(tokens, shape.tokens) * triton.cdiv(outputs, shape.rows)
    _fixed_kernel[(programs,)](
        x, weight, out if bias is None else bias, out, tokens, outputs, x.stride(0), out.stride(0),
        INPUTS=weight.shape[1], TOKENS=shape.tokens, ROWS=shape.rows, COLUMNS=DEPTH, BIAS=bias is not None, GROUP=8,
        PRECISION="ieee" if x.element_size() > 2 else "tf32", num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    return out
