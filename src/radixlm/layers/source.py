"""This module owns the step from a checkpoint's tensors to layers' parameters: dtype, device, fusing, packing and which
part of them this rank holds.

Models name tensors and whole sizes and get something callable back. What stands behind it (packed weights, a part of
them or quantised ones) is decided in a source, so model files need not change for it.

Tensor parallelism (Megatron-LM, https://arxiv.org/abs/1909.08053) knows three kinds of product: `column` (outputs are
cut, for what is looked at head by head or element by element), `row` (inputs are cut the same way, results are added
up) and `head` (outputs are cut and gathered). `linear` is whole on every rank. In a process by itself all are the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from radixlm.layers.embed import Embedding
from radixlm.layers.sharded import GatheredLinear, PartEmbedding, RowLinear
from radixlm.ops import linear as linear_ops
from radixlm.ops.linear import Linear
from radixlm.ops.norm import Norm
from radixlm.parallel.base import Comm
from radixlm.parallel.local import ALONE
from radixlm.parallel.shares import Cut, cut


class Tensors(Protocol):
    """A checkpoint, as far as layers know it."""

    def names(self) -> frozenset[str]: ...

    def get(self, name: str, shape: tuple[int, ...] | None = None, part: Cut | None = None) -> torch.Tensor: ...


class Source:
    """Makes parameters on one device in one dtype, and counts them.

    Attributes:
        comm: connects the ranks that hold the parts.
        fixed: products have one order of sums for any number of tokens (see `ops.triton_fixed`).
        parameters: numbers in the checkpoint's tensors so far, whole ones.
        bytes: memory that what was made so far holds here.
    """

    def __init__(
        self,
        tensors: Tensors,
        dtype: torch.dtype,
        device: torch.device,
        comm: Comm = ALONE,
        fixed: bool = False,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.comm = comm
        self.fixed = fixed
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

    def part(self, dim: int, length: int, units: int | None = None) -> Cut | None:
        """What this rank holds of a dimension that is cut: None in a process by itself, which holds everything.

        Args:
            length: of the whole dimension.
            units: equal pieces that are never cut, such as heads (None: single entries). With fewer of them than ranks,
                several ranks hold the same one.
        """
        if self.comm.size == 1:
            return None
        return cut(dim, length, units or length, self.comm.rank, self.comm.size)

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None, part: Cut | None = None) -> torch.Tensor:
        """The tensor `name` of that shape, or a part of it; no more than that is read."""
        found = self._tensors.get(name, shape) if part is None else self._tensors.get(name, shape, part)
        tensor = found.to(device=self.device, dtype=dtype or self.dtype)
        self.parameters += math.prod(shape)
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
        """One product for several linear layers of the same input, whole on every rank: their outputs lie side by side.

        Args:
            names: tensor names without `.weight` and `.bias`.
            outputs: the output size of each.
            norm: what the input is normalised by first; only where `fuses_norms`.
        """
        return self._columns(names, outputs, inputs, [None] * len(names), bias, norm)

    def column(
        self,
        names: Sequence[str],
        outputs: Sequence[int],
        inputs: int,
        *,
        units: Sequence[int | None] | None = None,
        bias: bool = False,
        norm: Norm | None = None,
    ) -> Linear:
        """The same with the outputs of each cut over the ranks: this rank's parts lie side by side.

        Args:
            outputs: whole sizes.
            units: for each of `names`, the pieces that are never cut (see `part`).
        """
        parts = [self.part(0, size, unit) for size, unit in zip(outputs, units or [None] * len(names), strict=True)]
        return self._columns(names, outputs, inputs, parts, bias, norm)

    def row(
        self,
        name: str,
        outputs: int,
        inputs: int,
        *,
        units: int | None = None,
        bias: bool = False,
        summed: bool = True,
    ) -> Linear:
        """A product whose input is what a `column` product gave, cut alike; its output is whole on every rank.

        Args:
            inputs: whole size.
            units: see `part`.
            summed: False leaves the sum over the ranks (`comm.all_reduce_`) to the caller, who adds up more first.
        """
        before = self.bytes
        weight = self.tensor(f"{name}.weight", outputs, inputs, part=self.part(1, inputs, units))
        part = linear_ops.make(weight, self._first_bias(name, outputs) if bias else None, fixed=self.fixed)
        self.bytes = before + part.bytes
        return RowLinear(part, self.comm) if summed and self.comm.size > 1 else part

    def embedding(self, name: str, vocab: int, width: int, scale: float = 1.0) -> Embedding | PartEmbedding:
        """The table of token embeddings `name`, [vocab, width]; each rank holds some of its rows."""
        if self.comm.size == 1:
            return Embedding(self.tensor(name, vocab, width), scale)
        rows = self._vocabulary(name, vocab, width)
        return PartEmbedding(rows, self.comm.rank * len(rows), self.comm, scale)

    def head(self, name: str, vocab: int, width: int) -> Linear:
        """The product that gives logits, from the weight `name`."""
        if self.comm.size == 1:
            return self.linear([name], [vocab], width)
        before = self.bytes
        part = linear_ops.make(self._vocabulary(f"{name}.weight", vocab, width), fixed=self.fixed)
        self.bytes = before + part.bytes
        return GatheredLinear(part, vocab, self.comm)

    def tied(self, table: torch.Tensor, vocab: int) -> Linear:
        """The same with the table of an `embedding`, which serves both."""
        made = linear_ops.make(table, fixed=self.fixed)
        if isinstance(made, linear_ops.PackedLinear):  # a copy, beside the tensor
            self.bytes += made.bytes
        return made if self.comm.size == 1 else GatheredLinear(made, vocab, self.comm)

    def _columns(
        self,
        names: Sequence[str],
        outputs: Sequence[int],
        inputs: int,
        parts: Sequence[Cut | None],
        bias: bool,
        norm: Norm | None,
    ) -> Linear:
        before = self.bytes
        each = list(zip(names, outputs, parts, strict=True))
        weights = [self.tensor(f"{name}.weight", size, inputs, part=part) for name, size, part in each]
        biases = [self.tensor(f"{name}.bias", size, part=part) for name, size, part in each if bias]
        made = linear_ops.make(
            weights[0] if len(weights) == 1 else torch.cat(weights),
            torch.cat(biases) if biases else None,
            norm,
            fixed=self.fixed,
        )
        self.bytes = before + made.bytes
        return made

    def _first_bias(self, name: str, outputs: int) -> torch.Tensor | None:
        """The bias of a sum over the ranks, which one of them adds."""
        bias = self.tensor(f"{name}.bias", outputs)
        return bias if self.comm.rank == 0 else None

    def _vocabulary(self, name: str, vocab: int, width: int) -> torch.Tensor:
        """This rank's rows of a [vocab, width] tensor, of whatever size: the last ranks pad with zeros."""
        each = -(-vocab // self.comm.size)
        start = min(vocab, self.comm.rank * each)
        count = min(each, vocab - start)
        rows = self.tensor(name, vocab, width, part=Cut(0, start, count))
        self.bytes += (each - count) * width * rows.element_size()
        return F.pad(rows, (0, 0, 0, each - count)) if count < each else rows
