"""This module owns the Qwen1.5 and Qwen2 mixtures of experts: Qwen2's attention, one expert for all tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from radixlm.attention.base import LayerSpec
from radixlm.layers.moe import MoeSpec
from radixlm.models import config as reading
from radixlm.models import experts
from radixlm.models.base import Weights
from radixlm.models.config import Fields, Sizes
from radixlm.models.decoder import Decoder, DecoderSpec
from radixlm.parallel.base import Comm
from radixlm.parallel.local import ALONE

POSITIONS = 32_768
WINDOW = 4096
#: The first layers, of which every other one has a window where windows are in use.
WINDOW_BELOW = 28


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
    return Decoder(made, experts.ExpertWeights(weights, made.moe.experts), dtype, device, comm, fixed)


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    fields = Fields(config)
    sizes = reading.sizes(fields)
    mixture = MoeSpec(
        experts=fields.integer("num_experts", 60),
        active=fields.integer("num_experts_per_tok", 4),
        inner=fields.integer("moe_intermediate_size", 1408),
        renormalise=fields.flag("norm_topk_prob", False),
        layers=experts.sparse_layers(fields, sizes.layers),
        shared=fields.integer("shared_expert_intermediate_size", 5632),
    )
    return DecoderSpec(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        context_length=context_length(config),
        eps=sizes.eps,
        activation=fields.text("hidden_act", "silu"),
        attention=_attention(fields, sizes),
        ropes=(reading.rope(fields, sizes.head_dim, reading.positions(fields, POSITIONS)),),
        rope_of=(0,) * sizes.layers,
        tied=fields.flag("tie_word_embeddings", False),
        qkv_bias=fields.flag("qkv_bias", True),
        moe=experts.check(mixture),
    )


def _attention(fields: Fields, sizes: Sizes) -> tuple[LayerSpec, ...]:
    """Windows apply only with `use_sliding_window`: to the layers of `layer_types`, or to every other early one."""
    layer = LayerSpec(sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.head_dim**-0.5)
    if not fields.flag("use_sliding_window", False):
        return (layer,) * sizes.layers
    below = int(fields.number("max_window_layers", WINDOW_BELOW))
    early = [index % 2 == 0 and index < below for index in range(sizes.layers)]
    default = ["sliding_attention" if windowed else "full_attention" for windowed in early]
    windowed = dataclasses.replace(layer, window=fields.integer("sliding_window", WINDOW))
    kinds = reading.layer_kinds(fields, sizes.layers, default)
    return tuple(windowed if kind == "sliding_attention" else layer for kind in kinds)
