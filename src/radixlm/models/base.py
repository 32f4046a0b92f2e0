"""This module owns the protocols between a model family, its checkpoint and the runner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from radixlm.attention.base import LayerSpec, Step
from radixlm.parallel.base import Comm
from radixlm.parallel.shares import Cut


class Weights(Protocol):
    """Tensors of a checkpoint under their Hugging Face names, whatever file they come from."""

    def names(self) -> frozenset[str]:
        """What the files hold. Empty for random weights, which have every tensor that is asked for."""
        ...

    def get(self, name: str, shape: tuple[int, ...] | None = None, part: Cut | None = None) -> torch.Tensor:
        """The tensor, in the dtype of the file, on the CPU.

        Args:
            shape: what the model expects. Families pass it always: random weights are made from it, and a file that
                disagrees is refused before it computes nonsense.
            part: what of it is wanted, None for all. The rest takes no memory once this returns.

        Raises:
            StartupError: naming the tensor if it is missing or broken, and both shapes if they differ.
        """
        ...


class Model(Protocol):
    """A decoder, loaded, on its device. Attention layers are numbered 0 .. len(layers) - 1.

    Where several ranks hold it in parts, `layers` are this rank's shares, all of them call `forward` and `head` with
    the same inputs, and each gets whole results.
    """

    layers: Sequence[LayerSpec]
    vocab_size: int
    hidden_size: int

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, step: Step) -> torch.Tensor:
        """ids, positions [T] int64 -> hidden states [T, hidden_size] after the last norm."""
        ...

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, hidden_size] -> logits [N, vocab_size] (soft-capped where the model does so)."""
        ...

    def parameter_count(self) -> int: ...

    def weight_bytes(self) -> int: ...


class Encoder(Protocol):
    """A model that reads whole texts at once and continues none, loaded, on its device."""

    vocab_size: int
    hidden_size: int
    layer_count: int

    def forward(self, ids: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Texts laid end to end, ids [T] int64 -> hidden states [T, hidden_size]; each text sees itself alone."""
        ...

    def parameter_count(self) -> int: ...

    def weight_bytes(self) -> int: ...


class EncoderFamily(Protocol):
    """A module named in `models.table.ENCODERS`. It exposes these functions."""

    def context_length(self, config: Mapping[str, Any]) -> int: ...

    def build(
        self, config: Mapping[str, Any], weights: Weights, dtype: torch.dtype, device: torch.device
    ) -> Encoder: ...


class Family(Protocol):
    """A module under `models/` named in `models.table`. It exposes these functions."""

    def context_length(self, config: Mapping[str, Any]) -> int: ...

    def build(
        self,
        config: Mapping[str, Any],
        weights: Weights,
        dtype: torch.dtype,
        device: torch.device,
        comm: Comm,
        fixed: bool,
    ) -> Model:
        """The model, or with several ranks this rank's part of it.

        Args:
            fixed: every sum has one order, whatever else is computed in the step.

        Raises:
            StartupError: it cannot be cut into so many parts or has no fixed order, or its weights are broken.
        """
        ...
