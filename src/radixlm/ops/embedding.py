"""This module owns looking up the rows of an embedding table."""

from __future__ import annotations

import torch


def embed(table: torch.Tensor, ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """table [vocab, n], ids [T] int64 -> [T, n] times `scale`, in the table's dtype."""
    rows = table.index_select(0, ids)
    return rows if scale == 1.0 else rows.mul_(scale)
