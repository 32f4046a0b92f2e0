"""This module owns RMS normalisation: y = x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""

from __future__ import annotations

from typing import Protocol

import torch

from radixlm.ops import gpu


class Norm(Protocol):
    """An RMS norm with its parameters.

    Attributes:
        weight: float32, broadcasts against the input.
        eps: float32, one element.
    """

    weight: torch.Tensor
    eps: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Step by step in float32, then rounded once to x's dtype. weight broadcasts against x."""
    wide = x.float()
    variance = wide.pow(2).mean(-1, keepdim=True)
    return (wide * torch.rsqrt(variance + eps) * weight.float()).to(x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    """The same with the fewest passes: the root of the sum of squares is one fused reduction.

    Args:
        x: [..., n], any strides; not changed.
        weight: float32, broadcasts against x.
        eps: float32, one element (a tensor, so that it can be an operand).
    """
    if (kernels := gpu.kernels(x)) is not None:
        out: torch.Tensor = kernels.rms_norm(x, weight, eps)
        return out
    wide = x.float()
    length = torch.linalg.vector_norm(wide, 2, -1, True)
    inverse = torch.addcmul(eps, length, length, value=1.0 / x.shape[-1]).rsqrt_()
    if x.dtype == torch.float32:  # wide is x itself
        return torch.mul(x, inverse).mul_(weight)
    return wide.mul_(inverse).mul_(weight).to(x.dtype)
