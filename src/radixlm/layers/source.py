"""This module owns the step from a checkpoint's tensors to layers' parameters: dtype, device, fusing and packing.

Models name tensors and sizes and get something callable back. What stands behind it (packed weights here; a shard of
them or quantised ones elsewhere) is decided in a source, so model files need not change for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from radixlm.ops import linear as linear_ops
from radixlm.ops.linear import Linear
from radixlm.ops.norm import Norm


class Tensors(Protocol):
    """A checkpoint, as far as layers know it."""

    def names(self) -> frozenset[str]: ...

    def get(self, name: str, shape: tuple[int, ...] | None = None) -> torch.Tensor: ...


class Source:
    """Makes parameters on one device in one dtype, and counts them.

    Attributes:
        parameters: numbers in the checkpoint's tensors so far.
        bytes: memory that what was made so far holds.
    """

    def __init__(self, tensors: Tensors, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self.parameters = 0
        self.bytes = 0
        self._tensors = tensors

    @property
    def packs(self) -> bool:
        """Products are packed for the CPU, where what follows one is fused into it."""
        return linear_ops.can_pack(self.dtype, self.device)

    @property
    def fuses_norms(self) -> bool:
        """Products take in the norm before them, see `linear`."""
        return linear_ops.has_kernels(self.dtype, self.device)

    def has(self, name: str) -> bool:
        return name in self._tensors.names()

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor `name` of that shape."""
        tensor = self._tensors.get(name, shape).to(device=self.device, dtype=dtype or self.dtype)
        self.parameters += tensor.numel()
        self.bytes += tensor.nbytes
        return tensor

    def linear(
        self,
        names: Sequence[str],
        outputs: Sequence[int],
        inputs: int,
        *,
        bias: bool = False,
        norm: Norm | None = None,
    ) -> Linear:
        """One product for several linear layers of the same input: their outputs lie side by side.

        Args:
            names: tensor names without `.weight` and `.bias`.
            outputs: the output size of each.
            norm: what the input is normalised by first; only where `fuses_norms`.
        """
        before = self.bytes
        weights = [self.tensor(f"{name}.weight", size, inputs) for name, size in zip(names, outputs, strict=True)]
        biases = [self.tensor(f"{name}.bias", size) for name, size in zip(names, outputs, strict=True) if bias]
        made = linear_ops.make(
            weights[0] if len(weights) == 1 else torch.cat(weights), torch.cat(biases) if biases else None, norm
        )
        self.bytes = before + made.bytes
        return made

    def tied(self, weight: torch.Tensor) -> Linear:
        """A product with a tensor that was made before and serves elsewhere too (an embedding table)."""
        made = linear_ops.make(weight)
        if isinstance(made, linear_ops.PackedLinear):  # a copy, beside the tensor
            self.bytes += made.bytes
        return made
