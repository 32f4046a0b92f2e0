"""This module owns the Qwen3 family: Qwen2's shape, queries and keys normalised per head, biases only on request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from radixlm.models import config as reading
from radixlm.models import qwen2
from radixlm.models.base import Weights
from radixlm.models.config import Fields
from radixlm.models.decoder import Decoder, DecoderSpec
from radixlm.parallel.base import Comm
from radixlm.parallel.local import ALONE

POSITIONS = 32_768
HEAD_DIM = 128


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
    sizes = reading.sizes(fields, HEAD_DIM)
    bias = fields.flag("attention_bias", False)
    return DecoderSpec(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        context_length=context_length(config),
        eps=sizes.eps,
        activation=fields.text("hidden_act", "silu"),
        attention=qwen2.attention(fields, sizes),
        ropes=(reading.rope(fields, sizes.head_dim, reading.positions(fields, POSITIONS)),),
        rope_of=(0,) * sizes.layers,
        tied=fields.flag("tie_word_embeddings", False),
        qkv_bias=bias,
        out_bias=bias,
        head_norm=True,
    )
