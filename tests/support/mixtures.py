"""Mixtures of experts with random weights, tokens that go where a test wants them, and a naive loop in float64."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

from radixlm.ops.activation import SILU, Activation
from radixlm.ops.grouped import Shape

CPU = torch.device("cpu")
#: Where tokens go: anywhere, all to the same experts, to the last few alone, or to the first of equal ones.
ROADS = ("anywhere", "one", "few", "ties")
#: (experts, experts of a token).
SIZES = [(experts, active) for experts in (4, 8, 16, 128) for active in (1, 2, 8) if active <= experts]


class Bank:
    """The weights of one mixture, equal for equal shapes, and what it must give."""

    def __init__(
        self,
        shape: Shape,
        dtype: torch.dtype,
        device: torch.device = CPU,
        *,
        renormalise: bool = True,
        activation: Activation = SILU,
    ) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self.renormalise, self.activation = renormalise, activation
        self._generator = torch.Generator().manual_seed(shape.experts * shape.active)
        self.gate_up = self._draw(shape.experts, 2 * shape.inner, shape.hidden, scale=shape.hidden**-0.5)
        self.down = self._draw(shape.experts, shape.hidden, shape.inner, scale=shape.inner**-0.5)

    def inputs(self, tokens: int, road: str = "anywhere") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x and residual [tokens, hidden] and scores [tokens, experts], equal for equal arguments."""
        self._generator.manual_seed(tokens)
        x, residual = self._draw(tokens, self.shape.hidden), self._draw(tokens, self.shape.hidden)
        scores = self._draw(tokens, self.shape.experts, scale=2.0)
        if road == "one":
            scores = scores[:1].repeat(tokens, 1)
        elif road == "few":
            scores[:, : -self.shape.active - 1] -= 30
        elif road == "ties":
            scores = scores.round()
        return x, residual, scores

    def expected(self, x: torch.Tensor, scores: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Token by token, expert by expert, in float64."""

        @cache
        def weights_of(expert: int) -> tuple[torch.Tensor, torch.Tensor]:
            return self.gate_up[expert].cpu().double(), self.down[expert].cpu().double()

        rows = []
        for token, values in zip(x.cpu().double(), scores.cpu().double(), strict=True):
            listed = values.tolist()
            best = sorted(range(len(listed)), key=lambda expert: (-listed[expert], expert))[: self.shape.active]
            weights = values.softmax(-1)[best]
            if self.renormalise:
                weights = weights / weights.sum()
            row = torch.zeros_like(token)
            for expert, weight in zip(best, weights, strict=True):
                gate_up, down = weights_of(expert)
                gate, up = F.linear(token, gate_up).chunk(2)
                row += weight * F.linear(self.activation.apply(gate) * up, down)
            rows.append(row)
        y = torch.stack(rows)
        return y if residual is None else y + residual.cpu().double()

    def _draw(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=self._generator) * scale).to(device=self.device, dtype=self.dtype)


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative, of the worst token."""
    assert torch.isfinite(got).all()
    assert got.shape == expected.shape
    wide = got.cpu().double()
    return float(((wide - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
