"""This module owns the CPU as a device: work is done when the call returns, tensors are the host's own memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from radixlm.base.facts import DeviceFacts
from radixlm.device import machine

#: Instructions that multiply bfloat16; without one of them torch converts to float32 and is slower than with float32.
BF16_FEATURES = ("amx_bf16", "avx512_bf16", "arm_bf16")


@dataclass(frozen=True, slots=True)
class Arrived:
    """A download that needs no copy."""

    tensors: list[torch.Tensor]

    def wait(self) -> list[torch.Tensor]:
        return self.tensors


class CpuDevice:
    kind = "cpu"

    def __init__(self) -> None:
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
        threads = wanted if wanted is not None else self._machine.cores
        torch.set_num_threads(threads)
        return threads, "asked for" if wanted is not None else "the cores that this process may use"

    def default_dtype(self, model: torch.dtype | None) -> tuple[torch.dtype, str]:
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
