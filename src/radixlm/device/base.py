"""This module owns the `Device` protocol: all that the runner asks of hardware."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy.typing as npt
import torch

from radixlm.base.facts import DeviceFacts


class Download(Protocol):
    """Tensors on their way to the host."""

    def wait(self) -> list[torch.Tensor]:
        """The tensors, readable on the host. Blocks until they have arrived."""
        ...


class Device(Protocol):
    """One piece of hardware that computes in order.

    It is opened with (rank, ranks): as which of the processes that compute one model together. A GPU is one rank's own,
    a CPU is shared.

    Attributes:
        torch_device: where its tensors live.
        sharers: ranks that share its memory.
    """

    kind: str
    torch_device: torch.device
    sharers: int

    def facts(self) -> DeviceFacts: ...

    def set_threads(self, wanted: int | None) -> tuple[int, str]:
        """Use this many host threads (None: what suits the machine), or a rank's share of them. Returns the number
        and why.
        """
        ...

    def default_dtype(self, model: torch.dtype | None) -> tuple[torch.dtype, str]:
        """The dtype that suits the device for a model stored in `model` (None: not known), and why."""
        ...

    def free_memory(self) -> int:
        """Bytes that could be taken now, by all `sharers` together."""
        ...

    def synchronise(self) -> None:
        """Wait until everything queued on the device is done."""
        ...

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """The array on the device, in its own dtype. It may share memory with `array`, so leave that alone."""
        ...

    def download(self, tensors: Sequence[torch.Tensor]) -> Download:
        """Start to copy tensors to the host, behind the work queued so far."""
        ...
