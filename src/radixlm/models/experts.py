"""This module owns what mixture-of-experts families share: reading their config, and one spelling for their tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

import torch

from radixlm.base.errors import StartupError
from radixlm.layers.moe import MoeSpec
from radixlm.models.base import Weights
from radixlm.models.config import Fields
from radixlm.parallel.shares import Cut

#: A tensor of one expert, as `layers.moe` names it.
_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<index>\d+)\.(?P<part>gate|up|down)_proj\.weight")


def sparse_layers(fields: Fields, layers: int) -> frozenset[int]:
    """Every `decoder_sparse_step`-th layer is a mixture (by default each one), but not those of `mlp_only_layers`."""
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.integers("mlp_only_layers") or []
    return frozenset(index for index in range(layers) if (index + 1) % step == 0 and index not in dense)


def check(spec: MoeSpec) -> MoeSpec:
    """The spec, if it can be.

    Raises:
        StartupError: a token would go through more experts than there are.
    """
    if spec.active > spec.experts:
        raise StartupError(
            f"config.json: num_experts_per_tok ({spec.active}) is more than the number of experts ({spec.experts})"
        )
    return spec


class ExpertWeights:
    """Weights with each expert's matrices under a name of their own, however the files keep them.

    The parts of an expert may have other names, and transformers can save a layer's experts as two stacked tensors,
    `experts.gate_up_proj` [experts, 2 * inner, hidden] and `experts.down_proj` [experts, hidden, inner]: then what is
    asked for is a part of these, which are not read as a whole.
    """

    def __init__(self, weights: Weights, experts: int, renames: Mapping[str, str] = MappingProxyType({})) -> None:
        """
        Args:
            experts: of each layer.
            renames: pieces of our names -> what the files say instead, for tensors that are not there as we name them.
        """
        self._weights = weights
        self._names = weights.names()
        self._experts = experts
        self._renames = renames

    def names(self) -> frozenset[str]:
        """As the files spell them."""
        return self._names

    def get(self, name: str, shape: tuple[int, ...] | None = None, part: Cut | None = None) -> torch.Tensor:
        match = _EXPERT.fullmatch(name)
        if match is not None and shape is not None:
            which = match["part"]
            stacked = f"{match['experts']}.{'down' if which == 'down' else 'gate_up'}_proj"
            if stacked in self._names:
                one = self._slice(stacked, int(match["index"]), which, shape)
                return one if part is None else one.narrow(part.dim, part.start, part.length).contiguous()
        if name not in self._names:
            for piece, theirs in self._renames.items():
                name = name.replace(piece, theirs)
        return self._weights.get(name, shape, part)

    def _slice(self, stacked: str, index: int, part: str, shape: tuple[int, ...]) -> torch.Tensor:
        rows, columns = shape
        whole = self._weights.get(stacked, (self._experts, rows if part == "down" else 2 * rows, columns))
        return whole[index, rows:] if part == "up" else whole[index, :rows]
