"""This module owns the RMS norm layer."""

from __future__ import annotations

import torch

from radixlm.ops.norm import rms_norm


class RmsNorm:
    """Normalises over the last dimension. The weight is kept in float32, in which the product is computed anyway."""

    __slots__ = ("eps", "weight")

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        """weight broadcasts against the input: [n], or [heads, n] where each head has its own."""
        self.weight = weight.float()
        self.eps = torch.full((1,), eps, dtype=torch.float32, device=weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)
