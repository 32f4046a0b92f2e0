"""This module owns the CPU as a device: work is done when the call returns, tensors are the host's own memory."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from radixlm.base.facts import DeviceFacts
from radixlm.device import machine

#: Instructions that multiply bfloat16; without one of them torch converts to float32 and is slower than with float32.
BF16_FEATURES = ("amx_bf16", "avx512_bf16", "arm_bf16")


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h


@dataclass(frozen=True, slots=True)
class Arrived:
    """A download that needs no copy."""

    tensors: list[torch.Tensor]

    def wait(self) -> list[torch.Tensor]:
        return self.tensors


class CpuDevice:
    kind = "cpu"

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        _keep_freed_memory()
        self.sharers = ranks
        self.torch_device = torch.device("cpu")
        self._machine = machine.read()

    def facts(self) -> DeviceFacts:
        host = self._machine
        return DeviceFacts(
            kind=self.kind,
            name=host.name,
            memory_total=host.memory_total,
            memory_free=self.free_memory(),
            cores=host.cores,
            threads=torch.get_num_threads(),
            features=host.features,
        )

    def set_threads(self, wanted: int | None) -> tuple[int, str]:
        everybody = wanted if wanted is not None else self._machine.cores
        threads = max(1, everybody // self.sharers)
        torch.set_num_threads(threads)
        reason = "asked for" if wanted is not None else "the cores that this process may use"
        return threads, reason if self.sharers == 1 else f"{everybody} for {self.sharers} ranks: {reason}"

    def default_dtype(self, model: torch.dtype | None) -> tuple[torch.dtype, str]:
        if model == torch.float32:
            return torch.float32, "the model's"
        for feature in BF16_FEATURES:
            if feature in self._machine.features:
                return torch.bfloat16, f"this CPU multiplies bfloat16 ({feature})"
        return torch.float32, "this CPU has no instructions for 16-bit floats"

    def free_memory(self) -> int:
        return machine.read().memory_free

    def synchronise(self) -> None:
        """Nothing is ever queued."""

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array if array.flags.writeable else array.copy())

    def download(self, tensors: Sequence[torch.Tensor]) -> Arrived:
        return Arrived(list(tensors))


def _keep_freed_memory() -> None:
    """Ask glibc to keep what is freed for the next allocation.

    Every step takes and frees the same megabytes. By default glibc gives them back to the system each time, and page
    faults of taking them again cost more than the arithmetic on them (half of the time of a sampling pass).
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the largest that glibc takes
        mallopt(_M_TRIM_THRESHOLD, 1 << 30)
