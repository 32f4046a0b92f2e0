"""This module owns mixtures of experts: of many feed-forward parts each token goes through the few that score highest.

y = sum over the k experts e of a token of w_e down_e(act(gate_e(x)) * up_e(x)), where w is the softmax of the router's
scores, taken at these experts, and made to sum to 1 if the model says so. Weights and sums are float32, and the k parts
are added in the order of their scores, so a token's result depends on others only as the rows of a matrix product do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from radixlm.ops import gpu, grouped
from radixlm.ops.activation import Activation

#: Tokens that go through a GPU's kernels at once: what lies between them takes k (hidden + inner) numbers a token.
MOST_TOKENS = 8192

#: x [n, hidden] -> [n, hidden].
Expert = Callable[[torch.Tensor], torch.Tensor]


class Mixture(Protocol):
    """x [T, hidden] and the router's scores [T, experts] -> y [T, hidden]."""

    def __call__(self, x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor: ...

    def plus(self, x: torch.Tensor, scores: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """y + residual, with residual [T, hidden], which may be overwritten."""
        ...


def route(scores: torch.Tensor, active: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference: scores [T, experts] -> the best experts [T, active] int64, best first, and weights, float32.

    Of equal scores the first expert counts as best.
    """
    weights, experts = scores.float().softmax(-1).sort(dim=-1, descending=True, stable=True)
    weights = weights[:, :active]
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return experts[:, :active], weights


class GroupedMixture:
    """The reference, and the way on a CPU: tokens are sorted by expert, and each one computes all of its own at once.

    Experts without tokens cost nothing. Reads counts back, so a CUDA graph cannot hold it.
    """

    __slots__ = ("_active", "_experts", "_renormalise")

    def __init__(self, experts: Sequence[Expert], active: int, renormalise: bool) -> None:
        self._experts = experts
        self._active = active
        self._renormalise = renormalise

    def __call__(self, x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self._mix(x, scores).to(x.dtype)

    def plus(self, x: torch.Tensor, scores: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self._mix(x, scores).add_(residual).to(x.dtype)

    def _mix(self, x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """In float32."""
        chosen, weights = route(scores, self._active, self._renormalise)
        chosen = chosen.flatten()
        order = chosen.argsort(stable=True)
        rows = x.index_select(0, order.div(self._active, rounding_mode="floor"))
        parts = x.new_empty(len(order), x.shape[1])
        start = 0
        for expert, count in enumerate(chosen.bincount(minlength=len(self._experts)).tolist()):
            if count:
                end = start + count
                parts.index_copy_(0, order[start:end], self._experts[expert](rows[start:end]))
                start = end
        parts = parts.view(len(x), self._active, -1)
        # One by one: the order of a library's sum may depend on the number of tokens.
        total = parts[:, 0].float() * weights[:, :1]
        for j in range(1, self._active):
            total.addcmul_(parts[:, j].float(), weights[:, j : j + 1])
        return total


class GpuMixture:
    """Fused kernels over stacked weights, see `triton_moe`."""

    __slots__ = ("_activation", "_active", "_bits", "_down", "_gate_up", "_most", "_renormalise", "_shape")

    def __init__(
        self, gate_up: torch.Tensor, down: torch.Tensor, active: int, renormalise: bool, activation: Activation
    ) -> None:
        """
        Args:
            gate_up: [experts, 2 * inner, hidden], gate rows first.
            down: [experts, hidden, inner].
        """
        self._gate_up = gate_up
        self._down = down
        self._active = active
        self._renormalise = renormalise
        self._activation = activation.name
        experts, hidden, inner = down.shape
        self._shape = grouped.Shape(experts, active, hidden, inner)
        self._bits = 8 * down.itemsize
        self._most = min(MOST_TOKENS, (grouped.LIMIT - 1) // (active * max(hidden, inner)))

    def __call__(self, x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if len(x) <= self._most:
            return self._mix(x, scores, None)
        return self.plus(x, scores, torch.zeros_like(x))

    def plus(self, x: torch.Tensor, scores: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        for start in range(0, len(x), self._most):
            part = slice(start, start + self._most)
            self._mix(x[part], scores[part], residual[part])
        return residual

    def _mix(self, x: torch.Tensor, scores: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        if not len(x):
            return x.new_empty(x.shape)
        y: torch.Tensor = gpu.mixtures().mixture(
            x,
            scores,
            self._gate_up,
            self._down,
            grouped.choose(len(x), self._shape, self._bits),
            active=self._active,
            renormalise=self._renormalise,
            activation=self._activation,
            into=into,
        )
        return y


def has_kernels(device: torch.device) -> bool:
    """Whether mixtures go through kernels of ours here. Unlike other products, in float32 too: a CUDA graph must hold
    them, and no library does this without reading counts back.
    """
    return device.type == "cuda" and gpu.available()
