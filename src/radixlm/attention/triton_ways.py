"""This module owns how the Triton kernels of attention are launched: how much one program takes at once, and with how
many warps. The numbers are measured (`benchmarks/gpu_attention.py` prints the best ones of a device).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Way:
    """
    Attributes:
        block: keys that are multiplied at once.
        stages: blocks whose keys and values are on their way at the same time.
        rows: query rows (tokens times query heads of a key head) of a program, at most; extends only.
    """

    block: int
    warps: int
    stages: int
    rows: int = 0


def decode(wide: int, size: int, splits: int) -> Way:
    """One row of a batch, one key head, a part of its context.

    Args:
        wide: head size, a power of two.
        size: bytes of a number, the larger of queries and keys.
        splits: parts of each context. Where batches fill the device by themselves there is one, and many small programs
            keep more reads under way than few large ones.
    """
    if wide > 128:
        return Way(32, 4, 3)
    if size > 2:
        return Way(32, 4, 2)
    return Way(32, 1, 3) if splits == 1 else Way(64, 2, 3)


def shared(wide: int, size: int, rows: int) -> Way:
    """`rows` query rows against a part of a prefix that they share."""
    block = 32 if wide > 128 else 64
    # Float32 takes twice the shared memory, and (without matrix units) twice the registers.
    if size > 2:
        return Way(block // 2, 8, 2)
    return Way(block, 8 if rows * wide > 64 * 128 else 4, 3)


def extend(wide: int, size: int) -> Way:
    """A run of tokens of one sequence against everything before them."""
    if wide <= 128 and size <= 2:
        return Way(64, 4, 3, 128)
    return Way(64 if wide <= 128 else 32, 4, 2, 64)
