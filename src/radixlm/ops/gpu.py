"""This module owns the way from an op to its Triton kernel: imported on first use, absent where Triton is."""

from __future__ import annotations

import functools
import importlib.util
from types import ModuleType

import torch

#: Kernels start while the one before them ends, see `triton_early`.
EARLY = False


@functools.cache
def available() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _kernels() -> ModuleType | None:
    if not available():
        return None
    from radixlm.ops import triton_kernels

    return triton_kernels


def kernels(x: torch.Tensor) -> ModuleType | None:
    """The module of Triton kernels if x is on a GPU that they run on, else None: then the torch form is taken."""
    return _kernels() if x.is_cuda else None


@functools.cache
def products() -> ModuleType:
    """The module of thin products, on a machine where Triton is `available`."""
    from radixlm.ops import triton_linear

    return triton_linear


@functools.cache
def mixtures() -> ModuleType:
    """The module of mixtures of experts, on a machine where Triton is `available`."""
    from radixlm.ops import triton_moe

    return triton_moe


@functools.cache
def fixed_products() -> ModuleType:
    """The module of products with one order of sums, on a machine where Triton is `available`."""
    from radixlm.ops import triton_fixed

    return triton_fixed
