"""This module owns matrix products with weights: a plain one (the reference) and one with weights packed for the CPU.

On a CPU the price of a small bf16 product in PyTorch is mostly the preparation of the weights, done again in every
call. Packing them once into oneDNN's blocked layout was measured 1.6 to 2.2 times faster for 1 token, 1.2 to 1.9 times
for 16, and never slower up to 2048 (AVX512-bf16 and AMX; bf16 and float32), so one packed copy serves every size. The
packed copy replaces the tensor; only a tied embedding is held twice, because rows cannot be looked up in a packed one.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from radixlm.ops.activation import Activation


class Linear(Protocol):
    """y = x W^T + b. x is [T, in] and contiguous, y is [T, out].

    The further methods are what decoders do with y next; an implementation may fuse it.
    """

    bytes: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """y + residual, with residual [T, out]."""
        ...

    def activated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """activation(y)."""
        ...

    def times(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """y * factor, with factor [T, out]."""
        ...


class PlainLinear:
    """The reference. Works for every device and dtype."""

    __slots__ = ("bytes", "_weight", "_bias")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias
        self.bytes = _bytes(weight, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        if self._bias is None:
            return torch.addmm(residual, x, self._weight.t())
        return F.linear(x, self._weight, self._bias).add_(residual)

    def activated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        return activation.apply(F.linear(x, self._weight, self._bias))

    def times(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias).mul_(factor)


class PackedLinear:
    """Weights in oneDNN's blocked layout; what follows the product runs inside it, on float32 sums."""

    __slots__ = ("bytes", "_weight", "_bias", "_unary", "_binary")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._bias = bias
        # Bound once: looking an operator up by name costs as much as a small one takes.
        self._unary = torch.ops.mkldnn._linear_pointwise.default
        self._binary = torch.ops.mkldnn._linear_pointwise.binary
        self.bytes = _bytes(weight, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._unary(x, self._weight, self._bias, "none", [], "")
        return y

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._binary(x, residual, self._weight, self._bias, "add")
        return y

    def activated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        attribute, algorithm = activation.post
        y: torch.Tensor = self._unary(x, self._weight, self._bias, attribute, [], algorithm)
        return y

    def times(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._binary(x, factor, self._weight, self._bias, "mul")
        return y


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN multiplies this dtype natively here."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def make(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """The fastest implementation for weight [out, in] (and bias [out]) on the device where it lies."""
    if can_pack(weight.dtype, weight.device):
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)


def _bytes(weight: torch.Tensor, bias: torch.Tensor | None) -> int:
    return weight.nbytes + (0 if bias is None else bias.nbytes)
