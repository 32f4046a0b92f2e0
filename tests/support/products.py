"""Thin products with everything that can be fused into them, and the same step by step in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from radixlm.ops import gpu
from radixlm.ops.thin import Tiles, Way

EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Fused:
    bias: bool = False
    normed: bool = False
    gated: bool = False
    added: bool = False


CASES = {
    "plain": Fused(),
    "bias": Fused(bias=True),
    "norm": Fused(normed=True),
    "gate": Fused(gated=True),
    "add": Fused(added=True),
    "norm and gate": Fused(normed=True, gated=True),
    "all": Fused(True, True, True, True),
    "bias and add": Fused(bias=True, added=True),
}


def possible(way: Way, fused: Fused) -> bool:
    return not isinstance(way, Tiles) or not (fused.normed or (fused.gated and way.split > 1))


class Product:
    """One weight [outputs, inputs] and the tensors that go with it, equal for equal shapes."""

    def __init__(self, fused: Fused, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> None:
        self.fused, self.dtype, self.device = fused, dtype, device
        self._generator = torch.Generator().manual_seed(outputs * inputs)
        self._inputs = inputs
        self._outputs = outputs // 2 if fused.gated else outputs
        self.weight = self._draw(outputs, inputs) / inputs**0.5
        self.bias = self._draw(outputs) if fused.bias else None
        self.gain = self._draw(inputs) if fused.normed else None
        self.eps = torch.full((1,), EPS, device=device)
        self.counts = torch.zeros(outputs, dtype=torch.int32, device=device)

    def input(self, tokens: int) -> torch.Tensor:
        """Equal for equal `tokens`."""
        self._generator.manual_seed(tokens)
        return self._draw(tokens, self._inputs)

    def multiply(self, way: Way, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        got: torch.Tensor = gpu.products().product(
            x,
            self.weight,
            way,
            bias=self.bias,
            gain=self.gain,
            eps=self.eps if self.fused.normed else None,
            gated=self.fused.gated,
            into=residual,
            counts=self.counts,
        )
        assert residual is None or got is residual
        return got

    def check(self, way: Way, tokens: int, rounding: float) -> None:
        x = self.input(tokens)
        residual = self._draw(tokens, self._outputs) if self.fused.added else None
        expected = self._expected(x, residual)
        got = self.multiply(way, x, residual)
        assert got.dtype == self.dtype
        assert got.shape == expected.shape
        assert torch.isfinite(got).all()
        error = (got.double() - expected).norm() / expected.norm()
        assert error < rounding, f"relative error {error:.2e}"

    def _expected(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        wide = x.double()
        if self.gain is not None:
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * self.gain.double()
        y = F.linear(wide, self.weight.double(), None if self.bias is None else self.bias.double())
        if self.fused.gated:
            gate, up = y.chunk(2, -1)
            y = F.silu(gate) * up
        return y if residual is None else y + residual.double()

    def _draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator).to(device=self.device, dtype=self.dtype)
