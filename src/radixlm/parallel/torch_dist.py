"""This module owns collectives over torch.distributed: gloo between CPUs, NCCL between GPUs of one host.

The ranks find each other through a file in a private directory. gloo then speaks TCP over the loopback interface alone;
what travels there are numbers that are added up. Process groups are objects of ours, not torch's default group, so that
two engines in one process do not share one; torch's object collectives, which pickle, are not used.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, FileStore, Store

from radixlm.base.errors import StartupError
from radixlm.parallel.base import Place

#: Seconds that a rank waits for the others in the middle of a step. They got the same plan at the same time, so more
#: than the compilation of a kernel never lies between them.
STEP_SECONDS = 60.0

#: Seconds that a rank waits while the others may still read their weights.
START_SECONDS = 1800.0


class TorchComm:
    """
    Args:
        group: a process group of torch.distributed that nobody else uses.
        device: where its tensors lie.
    """

    def __init__(self, group: Any, place: Place, name: str, device: torch.device) -> None:
        self.rank = place.rank
        self.size = place.size
        self.name = name
        self._group = group
        self._device = device
        self._sum = _options(dist.AllreduceOptions(), STEP_SECONDS)
        self._minimum = _options(dist.AllreduceOptions(), START_SECONDS)
        self._minimum.reduceOp = dist.ReduceOp.MIN
        self._gather = _options(AllgatherOptions(), STEP_SECONDS)

    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        self._group.allreduce([tensor], self._sum).wait()
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        rows, columns = tensor.shape
        gathered = tensor.new_empty(self.size * rows, columns)
        self._group._allgather_base(gathered, tensor.contiguous(), self._gather).wait()
        if rows == 1:
            return gathered.view(1, -1)
        return gathered.view(self.size, rows, columns).transpose(0, 1).reshape(rows, -1)

    def minimum(self, value: int) -> int:
        tensor = torch.tensor([value], dtype=torch.int64, device=self._device)
        self._group.allreduce([tensor], self._minimum).wait()
        return int(tensor.item())

    def abort(self) -> None:
        if self.name == "nccl":  # gloo's connections break by themselves
            self._group.abort()


def join(place: Place, device: torch.device) -> TorchComm:
    """Meet the other ranks: returns when all of them have called it.

    Raises:
        StartupError: they cannot be reached, or this torch cannot connect them.
    """
    assert place.meeting is not None
    store = FileStore(str(place.meeting), place.size)
    store.set_timeout(timedelta(seconds=START_SECONDS))
    try:
        return _MAKERS[device.type](store, place, device)
    except (RuntimeError, AttributeError, KeyError) as error:
        raise StartupError(f"rank {place.rank} cannot be connected to the others: {error}") from error


def _gloo(store: Store, place: Place, device: torch.device) -> TorchComm:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=START_SECONDS)
    group = dist.ProcessGroupGloo(store, place.rank, place.size, options)
    return TorchComm(group, place, "gloo", device)


def _nccl(store: Store, place: Place, device: torch.device) -> TorchComm:
    options = dist.ProcessGroupNCCL.Options()
    # NCCL knows one time-out for all operations. A rank that is gone is noticed by its parent long before.
    options._timeout = timedelta(seconds=START_SECONDS)
    comm = TorchComm(dist.ProcessGroupNCCL(store, place.rank, place.size, options), place, "nccl", device)
    comm.minimum(0)  # connects: now, while all ranks are here, and not while a graph is captured
    return comm


_MAKERS: dict[str, Callable[[Store, Place, torch.device], TorchComm]] = {"cpu": _gloo, "cuda": _nccl}


def _options(options: Any, seconds: float) -> Any:
    """Collectives that the current stream waits for (no stream of their own, no event in between)."""
    options.timeout = timedelta(seconds=seconds)
    options.asyncOp = False
    return options
