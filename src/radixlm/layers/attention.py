"""This module owns the attention layer around the attention itself: projections, head norms, rotation."""

from __future__ import annotations

import torch

from radixlm.attention.base import LayerSpec, Step
from radixlm.layers.norm import RmsNorm
from radixlm.layers.rope import Rotation
from radixlm.ops.linear import Linear
from radixlm.ops.rope import rotate_


class Attention:
    """Hidden states [T, n] to attended and projected ones [T, n].

    Queries and keys stay where the fused projection wrote them: they are normalised and rotated together, as one tensor
    of heads + kv_heads heads.
    """

    __slots__ = ("_dim", "_heads", "_index", "_kv_heads", "_norm", "_out", "_qkv")

    def __init__(self, index: int, spec: LayerSpec, qkv: Linear, out: Linear, norm: RmsNorm | None = None) -> None:
        """
        Args:
            index: number of this layer among the model's attention layers.
            norm: over the query heads, then the key heads, [heads + kv_heads, head_dim].
        """
        self._index = index
        self._heads = spec.heads
        self._kv_heads = spec.kv_heads
        self._dim = spec.head_dim
        self._qkv = qkv
        self._out = out
        self._norm = norm

    def __call__(self, x: torch.Tensor, rotation: Rotation, step: Step) -> torch.Tensor:
        return self._out(self._attend(x, rotation, step))

    def plus(self, x: torch.Tensor, rotation: Rotation, step: Step, residual: torch.Tensor) -> torch.Tensor:
        """The same, added to residual in the output projection."""
        return self._out.plus(self._attend(x, rotation, step), residual)

    def _attend(self, x: torch.Tensor, rotation: Rotation, step: Step) -> torch.Tensor:
        rotated = self._heads + self._kv_heads
        qkv = self._qkv(x).view(len(x), rotated + self._kv_heads, self._dim)
        if step.fuses:
            return step.attend_fused(self._index, qkv, rotation, self._norm)
        qk = qkv.narrow(1, 0, rotated)
        if self._norm is not None:
            qk = self._norm(qk)
        rotate_(qk, *rotation)
        q, k = qk.narrow(1, 0, self._heads), qk.narrow(1, self._heads, self._kv_heads)
        return step.attend(self._index, q, k, qkv.narrow(1, rotated, self._kv_heads))
