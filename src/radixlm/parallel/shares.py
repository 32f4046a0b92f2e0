"""This module owns the arithmetic of shares: which part of something that is made of equal units a rank holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cut:
    """A part of a tensor: `length` entries of dimension `dim` from `start` on."""

    dim: int
    start: int
    length: int


def fits(units: int, size: int) -> bool:
    """Whether `size` ranks can hold whole units, equally many each, or one unit for equally many ranks."""
    return units % size == 0 or size % units == 0


def share(units: int, rank: int, size: int) -> tuple[int, int]:
    """(first unit, how many) of a rank. With fewer units than ranks, neighbours hold the same one.

    A rank's query heads are then those of its key-value heads: both are cut in order, and one is a multiple of the
    other.
    """
    return rank * units // size, max(1, units // size)


def cut(dim: int, length: int, units: int, rank: int, size: int) -> Cut:
    """A rank's part of a dimension of `length` entries that is made of `units` equal units."""
    first, count = share(units, rank, size)
    unit = length // units
    return Cut(dim, first * unit, count * unit)


def nearest(size: int, works: Callable[[int], bool], most: int = 64) -> list[int]:
    """The sizes that work next to one that does not: below, then above, where there are any up to `most`."""
    below = next((n for n in range(size - 1, 0, -1) if works(n)), None)
    above = next((n for n in range(size + 1, most + 1) if works(n)), None)
    return [n for n in (below, above) if n is not None]
