"""This module owns the Qwen3 mixtures of experts: Qwen3's attention, mixtures in most layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from radixlm.attention.base import LayerSpec
from radixlm.layers.moe import MoeSpec
from radixlm.models import config as reading
from radixlm.models import experts
from radixlm.models.base import Weights
from radixlm.models.config import Fields
from radixlm.models.decoder import Decoder, DecoderSpec
from radixlm.parallel.base import Comm
from radixlm.parallel.local import ALONE

POSITIONS = 32_768
WINDOW = 4096


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
    """With `use_sliding_window` every layer has the window."""
    fields = Fields(config)
    sizes = reading.sizes(fields)
    bias = fields.flag("attention_bias", False)
    window = fields.integer("sliding_window", WINDOW) if fields.flag("use_sliding_window", False) else 0
    layer = LayerSpec(sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.head_dim**-0.5, window=window)
    mixture = MoeSpec(
        experts=fields.integer("num_experts", fields.integer("num_local_experts", 128)),
        active=fields.integer("num_experts_per_tok", 8),
        inner=fields.integer("moe_intermediate_size", 768),
        renormalise=fields.flag("norm_topk_prob", False),
        layers=experts.sparse_layers(fields, sizes.layers),
    )
    return DecoderSpec(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        context_length=context_length(config),
        eps=sizes.eps,
        activation=fields.text("hidden_act", "silu"),
        attention=(layer,) * sizes.layers,
        ropes=(reading.rope(fields, sizes.head_dim, reading.positions(fields, POSITIONS)),),
        rope_of=(0,) * sizes.layers,
        tied=fields.flag("tie_word_embeddings", False),
        qkv_bias=bias,
        out_bias=bias,
        head_norm=True,
        moe=experts.check(mixture),
    )
