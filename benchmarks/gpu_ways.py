"""This module owns the weights of a decode step whose products are timed, and the ways to multiply that are tried."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from radixlm.ops.thin import Tiles, Vector, Way


@dataclass(frozen=True, slots=True)
class Shape:
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    dim: int
    vocab: int
    layers: int
    head_norm: bool


SHAPES = {
    "8B": Shape(4096, 14336, 32, 8, 128, 128256, 32, False),
    "0.6B": Shape(1024, 3072, 16, 8, 128, 151936, 28, True),
}


@dataclass(frozen=True, slots=True)
class Product:
    """One weight [outputs, inputs] of a shape, and what goes with its product."""

    name: str
    outputs: int
    inputs: int
    normed: bool = False
    gated: bool = False
    added: bool = False

    @property
    def results(self) -> int:
        return self.outputs // 2 if self.gated else self.outputs

    @property
    def bytes(self) -> int:
        return 2 * self.outputs * self.inputs


def products(shape: Shape) -> list[Product]:
    q, kv = shape.heads * shape.dim, shape.kv_heads * shape.dim
    return [
        Product("qkv", q + 2 * kv, shape.hidden, normed=True),
        Product("o", shape.hidden, q, added=True),
        Product("gate_up", 2 * shape.inner, shape.hidden, normed=True, gated=True),
        Product("down", shape.hidden, shape.inner, added=True),
        Product("lm_head", shape.vocab, shape.hidden),
    ]


def ways(product: Product, tokens: int) -> list[Way]:
    """Ways to multiply that many tokens; the first is the likely one."""
    if product.name == "lm_head":
        return [Vector(tokens, 8, 1024, 4, 1), Vector(tokens, 16, 1024, 4, 1)] if tokens <= 4 else []
    if tokens <= 8:
        found: list[Way] = list(_vectors(product, tokens))
        return found + (list(_tiles(product, 16))[:2] if tokens >= 4 else [])
    return list(_tiles(product, tokens)) if tokens <= 64 else []


def _vectors(product: Product, tokens: int) -> Iterator[Vector]:
    small = product.results <= 1024
    narrow = product.inputs < 2048
    steps = product.inputs // (512 if narrow else 1024)
    if tokens == 1:
        unroll = min(4, steps)
        for rows in (4, 2) if small else (8, 4):
            yield Vector(1, rows, 512 if narrow else 1024, 2 if narrow else 4, unroll)
        if product.inputs % 2048 == 0:
            yield Vector(1, 2 if small else 8, 2048, 8, min(2, max(1, product.inputs // 2048)))
        if not narrow:
            yield Vector(1, 4 if product.gated or small else 8, 1024, 4, 1, stages=3)
        else:
            yield Vector(1, 2 if small else 8, 256, 1, 4)
    else:
        most = 2 if small else 4 if tokens == 8 or product.gated else 8
        for rows in {most, max(2, most // 2)}:
            yield Vector(tokens, rows, 512 if narrow else 1024, 2 if narrow else 4, 2 if tokens == 2 else 1)


def _tiles(product: Product, tokens: int) -> Iterator[Tiles]:
    rows, steps = product.results, product.inputs // 128
    split = 1
    while not product.gated and rows // 64 * split * 2 <= 132 and steps >= 4 * split and split < 8:
        split *= 2
    if tokens <= 16:
        yield Tiles(16, 16, 256, 1, 2, 4)
        yield Tiles(16, 64, 128, split, 4, 4 if product.gated else 5)
        yield Tiles(16, 32, 256, 1, 4, 3)
        if not product.gated and rows <= 1024:
            yield Tiles(16, 16, 256, 2, 2, 4)
    else:
        yield Tiles(64, 64, 128, split, 4, 4 if not product.gated else 3)
        yield Tiles(64, 32, 128, max(1, split // 2), 4, 4)
        if not product.gated:
            yield Tiles(64, 128, 64, min(8, 2 * split), 8, 4)


def short(way: Way | None) -> str:
    """A way as one writes it, without what is the default."""
    if way is None:
        return "None"
    values = [repr(value) for value in astuple(way)]
    while values[-1] == repr(fields(way)[len(values) - 1].default):
        values.pop()
    return f"{type(way).__name__}({', '.join(values)})"
