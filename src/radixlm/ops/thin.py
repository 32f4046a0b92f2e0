"""This module owns the choice of how a GPU multiplies few tokens with a weight: which kernel of ours, or the library.

The library's kernels are made for many tokens. With few the time is that of reading the weight, and what counts is to
have enough of it in flight on every multiprocessor from the first moment on.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Vector:
    """On the ordinary units. The only way that can normalise its input.

    Attributes:
        tokens: room for that many (a power of two). Registers hold a sum for each token, row and 8 columns.
        rows, columns: of the weight, that a program reads at once. `columns` is best 256 times `warps`: each thread
            then reads 16 bytes of every row.
        unroll: steps over the columns of which the compiler may move reads ahead.
        stages: above 1, reads go through that many buffers in shared memory instead.
        norm: every program normalises the input for itself, which saves a launch.
    """

    tokens: int
    rows: int
    columns: int
    warps: int = 4
    unroll: int = 2
    stages: int = 1
    norm: bool = True


@dataclass(frozen=True, slots=True)
class Tiles:
    """On the matrix units.

    Attributes:
        tokens: room for that many (a power of two, at least 16).
        rows, columns: of the weight, that a program reads at once; at least 16 each.
        split: parts of the columns that are summed by programs of their own (not in gated products).
        stages: buffers in shared memory that reads go through.
    """

    tokens: int
    rows: int
    columns: int
    split: int = 1
    warps: int = 4
    stages: int = 4


Way = Vector | Tiles

#: Programs that fill a large GPU (132 multiprocessors, two each).
PROGRAMS = 264
#: Up to so many tokens the ordinary units keep up with memory.
VECTOR_TOKENS = 4
#: Up to so many tokens matrix units are kept busy by us where the weight is small.
TILES_TOKENS = 64
#: Bytes of a weight that is read in a few microseconds: there the library spends its time on other things.
SMALL = 16 << 20
#: More outputs than this are a vocabulary: enough work for the library at any number of tokens.
VOCABULARY = 65536

#: What was measured best for a weight of (outputs, inputs): up to so many tokens this way, None for the library, which
#: is also taken beyond the last entry. Other weights follow `_rule`. `benchmarks/gpu_kernels.py` prints the lines.
#: On an H200, 16-bit weights.
MEASURED: Mapping[tuple[int, int], tuple[tuple[int, Way | None], ...]] = MappingProxyType(
    {
        (6144, 4096): (
            (1, Vector(1, 8, 1024, 4, 4)),
            (2, Vector(2, 4, 1024)),
            (16, Tiles(16, 64, 128, 1, 4, 5)),
        ),  # 8B qkv
        (4096, 4096): (
            (1, Vector(1, 4, 1024, 4, 4)),
            (2, Vector(2, 4, 1024)),
            (4, Tiles(16, 16, 256, 1, 2)),
            (8, Tiles(16, 64, 128, 2, 4, 5)),
            (16, Tiles(16, 16, 256, 1, 2)),
        ),  # 8B o
        (28672, 4096): (
            (1, Vector(1, 4, 1024, 4, 1, 3)),
            (2, Vector(2, 2, 1024, 4, 2, 1, False)),
            (16, Tiles(16, 64, 128)),
        ),  # 8B gate_up
        (4096, 14336): (
            (1, Vector(1, 8, 2048, 8)),
            (2, Vector(2, 8, 1024)),
            (16, Tiles(16, 64, 128, 2, 4, 5)),
            (64, Tiles(64, 64, 128, 2)),
        ),  # 8B down
        (128256, 4096): ((1, Vector(1, 8, 1024, 4, 1)), (2, Vector(2, 8, 1024, 4, 1))),  # 8B lm_head
        (4096, 1024): (
            (1, Vector(1, 4, 512, 2)),
            (2, Vector(2, 4, 512, 2)),
            (4, Vector(4, 8, 512, 2, 1)),
            (8, Tiles(16, 16, 256, 1, 2)),
            (16, Tiles(16, 32, 256, 1, 4, 3)),
        ),  # 0.6B qkv
        (1024, 2048): (
            (1, Vector(1, 4, 1024)),
            (2, Vector(2, 2, 1024)),
            (4, Vector(4, 2, 1024, 4, 1)),
            (16, Tiles(16, 64, 128, 8, 4, 5)),
        ),  # 0.6B o
        (6144, 1024): (
            (1, Vector(1, 4, 512, 2)),
            (2, Vector(2, 2, 512, 2)),
            (4, Vector(4, 4, 512, 2, 1)),
            (16, Tiles(16, 64, 128)),
        ),  # 0.6B gate_up
        (1024, 3072): (
            (1, Vector(1, 4, 1024, 4, 1, 3)),
            (2, Vector(2, 2, 1024)),
            (4, Vector(4, 2, 1024, 4, 1)),
            (16, Tiles(16, 64, 128, 8, 4, 5)),
        ),  # 0.6B down
        (151936, 1024): ((1, Vector(1, 8, 1024, 4, 1)), (2, Vector(2, 16, 1024, 4, 1))),  # 0.6B lm_head
    }
)


@functools.cache
def choose(tokens: int, outputs: int, inputs: int, gated: bool = False) -> Way | None:
    """The way to multiply `tokens` rows with a weight [outputs, inputs] of 16-bit numbers; None: the library.

    Args:
        gated: the first half of the outputs are gates, see `triton_linear.product`.
    """
    if not tokens or inputs % 8:  # rows must be aligned to 16 bytes
        return None
    measured = MEASURED.get((outputs, inputs))
    if measured is None:
        return _rule(tokens, outputs, inputs, gated)
    way = next((way for most, way in measured if tokens <= most), None)
    if gated and isinstance(way, Tiles):  # measured with another product of the same size
        return replace(way, split=1)
    return way


def _rule(tokens: int, outputs: int, inputs: int, gated: bool) -> Way | None:
    if outputs > VOCABULARY:
        return None
    rows = outputs // 2 if gated else outputs
    if tokens <= VECTOR_TOKENS:
        room = 1 << (tokens - 1).bit_length()
        most = 4 if gated and room > 1 else 8
        warps = 4 if inputs >= 2048 else 2
        unroll = 1 if room > 2 else max(1, min(4, inputs // (256 * warps)))
        return Vector(room, _rows(rows, most), 256 * warps, warps, unroll)
    if tokens <= TILES_TOKENS and 2 * outputs * inputs <= SMALL:
        room = max(16, 1 << (tokens - 1).bit_length())
        if room == 16:
            return Tiles(room, 16, 256, 1 if gated else _split(rows // 16, inputs // 256), warps=2)
        return Tiles(room, 64, 128, 1 if gated else _split(rows // 64, inputs // 128))
    return None


def _rows(rows: int, most: int) -> int:
    """Rows a program: as many as leave two programs for each multiprocessor."""
    while most > 1 and rows // most < PROGRAMS:
        most //= 2
    return most


def _split(programs: int, steps: int) -> int:
    """Parts, a power of two, that make about one program for each multiprocessor, each with two steps at least."""
    split = 1
    while programs * split * 2 <= PROGRAMS // 2 and steps >= split * 4 and split < 8:
        split *= 2
    return split
