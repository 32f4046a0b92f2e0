"""This module owns the output head: hidden states to logits."""

from __future__ import annotations

import torch

from radixlm.ops.linear import Linear


class Head:
    """A product with the vocabulary, softly capped if the model does so (`cap * tanh(x / cap)`)."""

    __slots__ = ("_linear", "_soft_cap")

    def __init__(self, linear: Linear, soft_cap: float = 0.0) -> None:
        self._linear = linear
        self._soft_cap = soft_cap

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, n] -> logits [N, vocab]."""
        logits = self._linear(hidden)
        if self._soft_cap:
            logits.div_(self._soft_cap).tanh_().mul_(self._soft_cap)
        return logits
