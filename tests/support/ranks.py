"""Ranks as threads of one process: a `Comm` that adds up and gathers in plain sight, to compare parts with wholes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from radixlm.parallel.base import Comm

T = TypeVar("T")


class _Meeting:
    """Where the threads lay down their tensors."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60.0)
        self.tensors: list[torch.Tensor | None] = [None] * size


class ThreadComm:
    name = "threads"

    def __init__(self, rank: int, size: int, meeting: _Meeting) -> None:
        self.rank = rank
        self.size = size
        self._meeting = meeting

    def _all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Everybody's tensor, in order of rank."""
        self._meeting.tensors[self.rank] = tensor.clone()
        self._meeting.barrier.wait()
        tensors = [tensor for tensor in self._meeting.tensors if tensor is not None]
        self._meeting.barrier.wait()
        return tensors

    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.is_contiguous()
        first, *others = self._all(tensor)
        return tensor.copy_(sum(others, first))

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._all(tensor), dim=1)

    def minimum(self, value: int) -> int:
        return min(int(tensor) for tensor in self._all(torch.tensor(value)))

    def abort(self) -> None:
        self._meeting.barrier.abort()


def together(size: int, work: Callable[[Comm], T]) -> list[T]:
    """What `work` returns on each of `size` ranks, which run at the same time. Raises what the first one raised."""
    meeting = _Meeting(size)

    def run(rank: int) -> T:
        try:
            return work(ThreadComm(rank, size, meeting))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    return [future.result() for future in futures]
