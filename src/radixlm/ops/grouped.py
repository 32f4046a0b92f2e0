"""This module owns the choice of how a GPU multiplies tokens with the weights of their experts: the sizes of tiles.

Tokens are sorted by expert, and each expert's are cut into blocks of one size: a program multiplies a block with some
rows of the expert's weight. Small blocks waste little where an expert has few tokens, large ones read a weight once for
many of them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Tiles:
    """A product on the matrix units.

    Attributes:
        rows, columns: of the weight, that a program reads at once (powers of two, at least 16).
        stages: buffers in shared memory that reads go through.
    """

    rows: int
    columns: int
    warps: int = 4
    stages: int = 4


@dataclass(frozen=True, slots=True)
class Way:
    """
    Attributes:
        tokens: of one expert in a block (a power of two, at least 16).
        gate_up, down: the two products. A program of the first reads `rows` of gate and as many of up.
    """

    tokens: int
    gate_up: Tiles
    down: Tiles


@dataclass(frozen=True, slots=True)
class Shape:
    """A mixture: experts, how many of them a token goes to, width of the model, inner width of an expert."""

    experts: int
    active: int
    hidden: int
    inner: int


#: Numbers in a tensor that a product reads or writes, and in the weight of one expert, must be fewer: kernels count in
#: 32 bits.
LIMIT = 1 << 31

#: Tokens that an expert has on average -> the way, up to so many.
_BY_LOAD: tuple[tuple[int, Way], ...] = (
    (8, Way(16, Tiles(32, 128), Tiles(32, 128))),
    (24, Way(32, Tiles(64, 64), Tiles(64, 128))),
    (64, Way(64, Tiles(64, 64), Tiles(128, 64))),
)
_MANY = Way(128, Tiles(128, 64, warps=8, stages=3), Tiles(128, 64, warps=8))
#: Numbers of 32 bits take twice the room in shared memory, and are for those who compare.
_WIDE = Way(16, Tiles(32, 32, stages=2), Tiles(32, 32, stages=2))

#: What was measured best for a shape: up to so many tokens this way, the last also beyond. Other shapes follow the
#: rule. `benchmarks/gpu_moe.py` prints the lines.
MEASURED: Mapping[Shape, tuple[tuple[int, Way], ...]] = MappingProxyType({})


@functools.cache
def choose(tokens: int, shape: Shape, bits: int = 16) -> Way:
    """The way for so many tokens.

    Args:
        bits: of a number in the weights.
    """
    if bits > 16:
        return _WIDE
    measured = MEASURED.get(shape)
    if measured is not None:
        return next((way for most, way in measured if tokens <= most), measured[-1][1])
    load = tokens * shape.active / shape.experts
    return next((way for most, way in _BY_LOAD if load <= most), _MANY)


def blocks(entries: int, experts: int, size: int) -> int:
    """The most blocks of `size` that so many entries can need, whichever experts they go to.

    An expert's last block may hold a single entry, and there are no more experts at work than entries.
    """
    return (entries + min(entries, experts) * (size - 1)) // size
