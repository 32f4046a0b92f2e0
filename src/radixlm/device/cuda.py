"""This module owns an NVIDIA GPU as a device: one stream of queued work, results fetched by asynchronous copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from radixlm.base.errors import StartupError
from radixlm.base.facts import DeviceFacts


def objection() -> str | None:
    """Why this device cannot be used here, or None."""
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if not torch.cuda.is_available():
        return "no GPU visible"
    return None


class Copying:
    """Tensors being copied into pinned memory of their own; `wait` blocks on the event behind the copies alone."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        for copy, tensor in zip(self._copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        self._event = torch.Event("cuda")
        self._event.record()

    def wait(self) -> list[torch.Tensor]:
        self._event.synchronize()
        return self._copies


class CudaDevice:
    kind = "cuda"
    sharers = 1

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        """With several ranks the GPU of that number among the visible ones, else torch's current one.

        Raises:
            StartupError: there are fewer GPUs than ranks.
        """
        if ranks > (there := torch.cuda.device_count()):
            raise StartupError(
                f"--tensor-parallel-size is {ranks}, and {there} GPU{'s are' if there > 1 else ' is'} visible: "
                f"use {there} or less",
                param="tensor_parallel_size",
            )
        if ranks > 1:
            torch.cuda.set_device(rank)  # kernels and streams of this process go there
        self._index = torch.cuda.current_device()
        self.torch_device = torch.device("cuda", self._index)

    def facts(self) -> DeviceFacts:
        properties = torch.cuda.get_device_properties(self._index)
        free, total = torch.cuda.mem_get_info(self._index)
        return DeviceFacts(
            kind=self.kind,
            name=properties.name,
            memory_total=total,
            memory_free=free,
            cores=properties.multi_processor_count,
            threads=torch.get_num_threads(),
            features=(f"sm_{properties.major}{properties.minor}",),
        )

    def set_threads(self, wanted: int | None) -> tuple[int, str]:
        # The host only launches work: more threads would take cores from the other processes.
        threads = wanted if wanted is not None else 1
        torch.set_num_threads(threads)
        return threads, "asked for" if wanted is not None else "the GPU does the arithmetic"

    def default_dtype(self, model: torch.dtype | None) -> tuple[torch.dtype, str]:
        half = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
        if model is None or model == torch.float32:
            return half, "half the bytes of float32"
        if model == torch.bfloat16 and half != model:
            return half, "this GPU has no bfloat16"
        return model, "the model's own"

    def free_memory(self) -> int:
        free, _ = torch.cuda.mem_get_info(self._index)
        reserved = torch.cuda.memory_reserved(self._index) - torch.cuda.memory_allocated(self._index)
        return free + reserved

    def synchronise(self) -> None:
        torch.cuda.synchronize(self._index)

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        # From pinned memory the copy is only queued; from the array itself the host would wait for it.
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        pinned = torch.empty(array.shape, dtype=dtype, pin_memory=True)
        pinned.numpy()[...] = array
        return pinned.to(self.torch_device, non_blocking=True)

    def download(self, tensors: Sequence[torch.Tensor]) -> Copying:
        return Copying(tensors)
