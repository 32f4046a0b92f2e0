"""This module owns scratch memory that attention reuses from call to call."""

from __future__ import annotations

import math

import torch


class Scratch:
    """Named buffers that grow to the largest size asked for.

    Fresh allocations of megabytes are page-faulted in again on every call, which costs more than the arithmetic done in
    them. What `take` returns is valid until the same name is taken again.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def take(self, name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """An uninitialised dense tensor of that shape."""
        count = math.prod(shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < count:
            buffer = torch.empty(count, dtype=dtype)
            self._buffers[name, dtype] = buffer
        return buffer[:count].view(shape)
