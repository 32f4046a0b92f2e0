"""This module owns the Qwen2 and Qwen2.5 family: Llama's shape, biases on queries, keys and values, maybe windows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from radixlm.attention.base import LayerSpec
from radixlm.models import config as reading
from radixlm.models.base import Weights
from radixlm.models.config import Fields, Sizes
from radixlm.models.decoder import Decoder, DecoderSpec
from radixlm.parallel.base import Comm
from radixlm.parallel.local import ALONE

POSITIONS = 32_768
WINDOW = 4096
#: The first layers that see everything where windows are in use.
WINDOW_FROM = 28


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
    return Decoder(spec(config), weights, dtype, device, comm, fixed)


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    fields = Fields(config)
    sizes = reading.sizes(fields)
    return DecoderSpec(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        context_length=context_length(config),
        eps=sizes.eps,
        activation=fields.text("hidden_act", "silu"),
        attention=attention(fields, sizes),
        ropes=(reading.rope(fields, sizes.head_dim, reading.positions(fields, POSITIONS)),),
        rope_of=(0,) * sizes.layers,
        tied=fields.flag("tie_word_embeddings", False),
        qkv_bias=True,
    )


def attention(fields: Fields, sizes: Sizes) -> tuple[LayerSpec, ...]:
    """Windows apply only with `use_sliding_window`: to the layers of `layer_types`, or from `max_window_layers` on."""
    layer = LayerSpec(sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.head_dim**-0.5)
    if not fields.flag("use_sliding_window", False):
        return (layer,) * sizes.layers
    first = int(fields.number("max_window_layers", WINDOW_FROM))
    default = ["sliding_attention" if index >= first else "full_attention" for index in range(sizes.layers)]
    windowed = dataclasses.replace(layer, window=fields.integer("sliding_window", WINDOW))
    kinds = reading.layer_kinds(fields, sizes.layers, default)
    return tuple(windowed if kind == "sliding_attention" else layer for kind in kinds)
