"""This module owns matrix products with weights: a plain one (the reference), packed for a CPU, and thin for a GPU.

On a CPU the price of a small bf16 product in PyTorch is mostly the preparation of the weights, done again in every
call. Packing them once into oneDNN's blocked layout was measured 1.6 to 2.2 times faster for 1 token, 1.2 to 1.9 times
for 16, and never slower up to 2048 (AVX512-bf16 and AMX; bf16 and float32), so one packed copy serves every size. The
packed copy replaces the tensor; only a tied embedding is held twice, because rows cannot be looked up in a packed one.

On a GPU a step of few tokens is bound by reading the weights and by the number of launches. There the kernels of
`triton_linear` read a weight once and take in the norm before the product, and the gating or the addition behind it.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from radixlm.ops import gpu, thin
from radixlm.ops.activation import SILU, Activation, gated
from radixlm.ops.norm import Norm


class Linear(Protocol):
    """y = x W^T + b. x is [T, in] and contiguous, y is [T, out].

    The further methods are what decoders do with y next; an implementation may fuse it.
    """

    bytes: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """y + residual, with residual [T, out], which may be overwritten."""
        ...

    def gated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """activation of the first half of y times the second half, [T, out / 2]."""
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

    def gated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        return gated(F.linear(x, self._weight, self._bias), activation)

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

    def gated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        return gated(self(x), activation)

    def activated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        attribute, algorithm = activation.post
        y: torch.Tensor = self._unary(x, self._weight, self._bias, attribute, [], algorithm)
        return y

    def times(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._binary(x, factor, self._weight, self._bias, "mul")
        return y


class GpuLinear:
    """For 16-bit weights on a GPU: kernels that read the weight once for few tokens, the library for many (see `thin`).

    With a norm, x is normalised first: y = norm(x) W^T + b. Few tokens are normalised within the product.
    """

    __slots__ = ("_bias", "_counts", "_gain", "_inputs", "_norm", "_outputs", "_weight", "bytes")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, norm: Norm | None = None) -> None:
        self._weight = weight
        self._bias = bias
        self._norm = norm
        self._gain = None if norm is None else _narrowed(norm.weight, weight.dtype)
        self._outputs, self._inputs = weight.shape
        # One for each tile of at least 16 rows; see `triton_linear.product`.
        self._counts = torch.zeros(-(-len(weight) // 16), dtype=torch.int32, device=weight.device)
        self.bytes = _bytes(weight, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        way = thin.choose(len(x), self._outputs, self._inputs)
        if way is None:
            return F.linear(self._normed(x), self._weight, self._bias)
        return self._product(x, way)

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        way = thin.choose(len(x), self._outputs, self._inputs)
        if way is not None:
            return self._product(x, way, into=residual)
        if self._bias is None:
            # In place: otherwise the residual is copied first, by a launch of its own.
            return residual.addmm_(self._normed(x), self._weight.t())
        return residual.add_(F.linear(self._normed(x), self._weight, self._bias))

    def gated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        way = thin.choose(len(x), self._outputs, self._inputs, True) if activation is SILU else None
        return gated(self(x), activation) if way is None else self._product(x, way, gate=True)

    def activated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        return activation.apply(self(x))

    def times(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return self(x).mul_(factor)

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._norm is None else self._norm(x)

    def _product(
        self, x: torch.Tensor, way: thin.Way, *, into: torch.Tensor | None = None, gate: bool = False
    ) -> torch.Tensor:
        inside = self._gain is not None and isinstance(way, thin.Vector) and way.norm
        y: torch.Tensor = gpu.products().product(
            x if inside else self._normed(x),
            self._weight,
            way,
            bias=self._bias,
            gain=self._gain if inside else None,
            eps=self._norm.eps if inside and self._norm is not None else None,
            gated=gate,
            into=into,
            counts=self._counts,
        )
        return y


class FixedLinear:
    """For a GPU: results of a token that do not depend on how many others there are (see `triton_fixed`)."""

    __slots__ = ("_bias", "_norm", "_weight", "bytes")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, norm: Norm | None = None) -> None:
        self._weight = weight
        self._bias = bias
        self._norm = norm
        self.bytes = _bytes(weight, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = gpu.fixed_products().product(
            x if self._norm is None else self._norm(x), self._weight, self._bias
        )
        return y

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual.add_(self(x))

    def gated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        return gated(self(x), activation)

    def activated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        return activation.apply(self(x))

    def times(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return self(x).mul_(factor)


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN multiplies this dtype natively here."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def has_kernels(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products of few tokens go through kernels of ours here. float32 is for those who compare."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and gpu.available()


def make(
    weight: torch.Tensor, bias: torch.Tensor | None = None, norm: Norm | None = None, *, fixed: bool = False
) -> Linear:
    """The fastest implementation for weight [out, in] (and bias [out]) on the device where it lies.

    Args:
        norm: normalises x first; only where `has_kernels`.
        fixed: sums have one order for any number of tokens; GPUs with Triton alone.
    """
    if fixed:
        return FixedLinear(weight, bias, norm)
    if has_kernels(weight.dtype, weight.device):
        return GpuLinear(weight, bias, norm)
    assert norm is None
    if can_pack(weight.dtype, weight.device):
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)


def _bytes(weight: torch.Tensor, bias: torch.Tensor | None) -> int:
    return weight.nbytes + (0 if bias is None else bias.nbytes)


def _narrowed(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """The weight of a norm in the dtype of the product's, or None if that would round it."""
    narrow = weight.to(dtype)
    return narrow if torch.equal(narrow.to(weight.dtype), weight) else None
