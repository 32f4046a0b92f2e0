"""This module owns the Mixtral family: Llama's shape, every feed-forward part a mixture of experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from radixlm.layers.moe import MoeSpec
from radixlm.models import config as reading
from radixlm.models import experts, llama
from radixlm.models.base import Weights
from radixlm.models.config import Fields
from radixlm.models.decoder import Decoder, DecoderSpec
from radixlm.parallel.base import Comm
from radixlm.parallel.local import ALONE

POSITIONS = 131_072
DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {"max_position_embeddings": POSITIONS, "rope_theta": 1e6, "rms_norm_eps": 1e-5}
)
#: What checkpoints say instead. The last ones are Llama's own names: w2 is the matrix that leads down.
NAMES: Mapping[str, str] = MappingProxyType(
    {".mlp.": ".block_sparse_moe.", ".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."}
)


def context_length(config: Mapping[str, Any]) -> int:
    return reading.context_length(Fields(config), POSITIONS)


def build(
    config: Mapping[str, Any],
    weights: Weights,
    dtype: torch.dtype,
    device: torch.device,
    comm: Comm = ALONE,
    fixed: bool = False,
) -> Decoder:
    made = spec(config)
    assert made.moe is not None
    return Decoder(made, experts.ExpertWeights(weights, made.moe.experts, NAMES), dtype, device, comm, fixed)


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    """`sliding_window` null or left out means none."""
    fields = Fields(config)
    stated = {name: value for name, value in config.items() if value is not None}
    plain = llama.spec({**DEFAULTS, "num_key_value_heads": config.get("num_key_value_heads", 8), **stated})
    window = fields.integer("sliding_window") if "sliding_window" in fields else 0
    mixture = MoeSpec(
        experts=fields.integer("num_local_experts", 8),
        active=fields.integer("num_experts_per_tok", 2),
        inner=plain.intermediate_size,
        renormalise=True,
        layers=frozenset(range(len(plain.attention))),
    )
    return dataclasses.replace(
        plain,
        attention=tuple(dataclasses.replace(layer, window=window) for layer in plain.attention),
        moe=experts.check(mixture),
    )
