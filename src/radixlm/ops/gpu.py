"""This module owns the way from an op to its Triton kernel: imported on first use, absent where Triton is."""

from __future__ import annotations

import functools
import importlib.util
from types import ModuleType

import torch


@functools.cache
def _kernels() -> ModuleType | None:
    if importlib.util.find_spec("triton") is None:
        return None
    from radixlm.ops import triton_kernels

    return triton_kernels


def kernels(x: torch.Tensor) -> ModuleType | None:
    """The module of Triton kernels if x is on a GPU that they run on, else None: then the torch form is taken."""
    return _kernels() if x.is_cuda else None
