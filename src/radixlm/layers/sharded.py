"""This module owns products and tables that ranks hold in parts, and the operation that makes the parts a whole.

A column product needs none: each rank computes some of the outputs, with an ordinary `Linear` over its rows of the
weight. What comes out of it goes into a row product, whose inputs are cut the same way.
"""

from __future__ import annotations

import torch

from radixlm.ops.activation import Activation, gated
from radixlm.ops.embedding import embed
from radixlm.ops.linear import Linear
from radixlm.parallel.base import Comm


class RowLinear:
    """A product whose inputs are cut: every rank computes all outputs from some of the inputs, and they are added up.

    What is added to the product is added by rank 0 alone, inside its own product. So the bias is in the part of rank 0
    and in no other.
    """

    __slots__ = ("_comm", "_first", "_part", "bytes")

    def __init__(self, part: Linear, comm: Comm) -> None:
        self._part = part
        self._comm = comm
        self._first = comm.rank == 0
        self.bytes = part.bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._comm.all_reduce_(self._part(x))

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self._comm.all_reduce_(self._part.plus(x, residual) if self._first else self._part(x))

    def gated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        return gated(self(x), activation)

    def activated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        return activation.apply(self(x))

    def times(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return self(x).mul_(factor)


class GatheredLinear:
    """A product whose outputs are cut and put side by side, on every rank.

    Args:
        outputs: of all ranks; the last ones may hold padding behind them.
    """

    __slots__ = ("_comm", "_outputs", "_part", "bytes")

    def __init__(self, part: Linear, outputs: int, comm: Comm) -> None:
        self._part = part
        self._outputs = outputs
        self._comm = comm
        self.bytes = part.bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._comm.all_gather(self._part(x)).narrow(1, 0, self._outputs)

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self(x).add_(residual)

    def gated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        return gated(self(x), activation)

    def activated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        return activation.apply(self(x))

    def times(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return self(x).mul_(factor)


class PartEmbedding:
    """Token ids to hidden states, where each rank holds some rows of the table: the others give zeros to the sum."""

    __slots__ = ("_comm", "_first", "_scale", "table")

    def __init__(self, table: torch.Tensor, first: int, comm: Comm, scale: float = 1.0) -> None:
        """
        Args:
            table: this rank's rows, from token `first` on.
            scale: see `layers.embed.Embedding`.
        """
        self.table = table
        self._first = first
        self._comm = comm
        self._scale = float(torch.tensor(scale, dtype=table.dtype))

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        places = ids - self._first
        elsewhere = (places < 0) | (places >= len(self.table))
        rows = embed(self.table, places.masked_fill_(elsewhere, 0), self._scale)
        # Not a product with zero: a row that is not a number must not reach other tokens.
        return self._comm.all_reduce_(rows.masked_fill_(elsewhere[:, None], 0))
