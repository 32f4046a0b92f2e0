"""This module owns the token embedding layer."""

from __future__ import annotations

import torch

from radixlm.ops.embedding import embed


class Embedding:
    """Token ids to hidden states."""

    __slots__ = ("_scale", "table")

    def __init__(self, table: torch.Tensor, scale: float = 1.0) -> None:
        """
        Args:
            scale: multiplier of the rows; rounded to the table's dtype, as the models that have one were trained.
        """
        self.table = table
        self._scale = float(torch.tensor(scale, dtype=table.dtype))

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return embed(self.table, ids, self._scale)
