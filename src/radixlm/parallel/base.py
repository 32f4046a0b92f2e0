"""This module owns the words of tensor parallelism: `Place` (which rank a process is) and the `Comm` protocol.

It imports no torch, so that a process may learn its place before it decides on a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Place:
    """Which of the processes that compute one model together this is.

    Attributes:
        rank: 0 decides; the others (1 .. size - 1) carry out what it plans.
        size: 1 is a process by itself.
        meeting: file through which the ranks find each other, in a directory that only this user can enter. Not needed
            by a process by itself.
    """

    rank: int = 0
    size: int = 1
    meeting: Path | None = None


class Comm(Protocol):
    """Collective operations: every rank calls the same ones in the same order, with tensors of the same shape and
    dtype. With size 1 each is the identity.

    A collective that fails on one rank cannot be repeated: the ranks are out of step from then on. Whoever sees one
    raise has to end its process.

    Attributes:
        name: of what carries the data, for the reader.
    """

    rank: int
    size: int
    name: str

    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, the same bits on each. Overwrites the tensor, which is contiguous, and returns it."""
        ...

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """tensor [N, n] of each rank -> [N, size * n]: side by side, in order of rank."""
        ...

    def minimum(self, value: int) -> int:
        """The smallest value over the ranks. Waits for all of them, also for one that still reads its weights."""
        ...

    def abort(self) -> None:
        """End operations that wait for a rank that is gone, from another thread. Nothing can be done with it after."""
        ...
