"""This module owns the activation functions of gated feed-forward layers, by the names that model configs use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F

from radixlm.base.errors import StartupError
from radixlm.ops import gpu


@dataclass(frozen=True, slots=True)
class Activation:
    """An elementwise function.

    Attributes:
        apply: the reference; may not change its argument.
        post: (attribute, algorithm) under which oneDNN knows it as an operation fused behind a matrix product.
    """

    name: str
    apply: Callable[[torch.Tensor], torch.Tensor]
    post: tuple[str, str]


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


SILU = Activation("silu", F.silu, ("swish", ""))
GELU = Activation("gelu", F.gelu, ("gelu", "none"))
GELU_TANH = Activation("gelu_pytorch_tanh", _gelu_tanh, ("gelu", "tanh"))
RELU = Activation("relu", F.relu, ("relu", ""))

ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "silu": SILU,
        "swish": SILU,
        "gelu": GELU,
        "gelu_new": GELU_TANH,
        "gelu_fast": GELU_TANH,
        "gelu_pytorch_tanh": GELU_TANH,
        "relu": RELU,
    }
)


def gated(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """x [T, 2n]: activation of the first half times the second half, [T, n]."""
    if activation is SILU and (kernels := gpu.kernels(x)) is not None:
        out: torch.Tensor = kernels.silu_mul(x)
        return out
    gate, up = x.chunk(2, dim=-1)
    return activation.apply(gate) * up


def find(name: str) -> Activation:
    """The activation of that name.

    Raises:
        StartupError: listing the known ones.
    """
    if name not in ACTIVATIONS:
        raise StartupError(f"the model's activation {name!r} is not known; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
