"""This module owns the rotation tables of a model: one per kind of rope its layers use."""

from __future__ import annotations

import torch

from radixlm.ops import rope
from radixlm.ops.rope import RopeParameters

#: cos and sin of a step's tokens, [T, 1, dim] each.
Rotation = tuple[torch.Tensor, torch.Tensor]


class Rope:
    """The angles of all positions, computed once."""

    __slots__ = ("_table", "bytes")

    def __init__(self, parameters: RopeParameters, positions: int, dtype: torch.dtype, device: torch.device) -> None:
        self._table = rope.table(parameters, positions, dtype, device)
        self.bytes = self._table.nbytes

    def __call__(self, positions: torch.Tensor) -> Rotation:
        """positions [T] -> what layers rotate a step's queries and keys by."""
        found = self._table.index_select(0, positions)
        return found[:, :1], found[:, 1:]
