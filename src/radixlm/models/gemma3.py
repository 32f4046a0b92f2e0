"""This module owns the text models of Gemma 3: windowed layers with a rotation of their own, four norms a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from radixlm.attention.base import LayerSpec
from radixlm.base.errors import StartupError
from radixlm.models import config as reading
from radixlm.models.base import Weights
from radixlm.models.config import Fields
from radixlm.models.decoder import Decoder, DecoderSpec
from radixlm.ops.rope import RopeParameters
from radixlm.parallel.base import Comm
from radixlm.parallel.local import ALONE

POSITIONS = 131_072
HEAD_DIM = 256
WINDOW = 4096
THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
#: Every so many layers one sees everything.
PATTERN = 6


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
    if fields.flag("use_bidirectional_attention", False):
        raise StartupError("config.json: use_bidirectional_attention is true; only causal models can generate")
    sizes = reading.sizes(fields, HEAD_DIM)
    pattern = fields.integer("sliding_window_pattern", PATTERN)
    default = ["full_attention" if (index + 1) % pattern == 0 else "sliding_attention" for index in range(sizes.layers)]
    kinds = reading.layer_kinds(fields, sizes.layers, default)
    window = fields.integer("sliding_window", WINDOW)
    bias = fields.flag("attention_bias", False)

    def layer(kind: str) -> LayerSpec:
        return LayerSpec(
            sizes.heads,
            sizes.kv_heads,
            sizes.head_dim,
            fields.number("query_pre_attn_scalar", 256) ** -0.5,
            window=window if kind == "sliding_attention" else 0,
            soft_cap=fields.number("attn_logit_softcapping", 0.0),
        )

    return DecoderSpec(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        context_length=context_length(config),
        eps=sizes.eps,
        activation=fields.text("hidden_activation", "gelu_pytorch_tanh"),
        attention=tuple(layer(kind) for kind in kinds),
        ropes=_ropes(config, sizes.head_dim),
        rope_of=tuple(int(kind == "sliding_attention") for kind in kinds),
        tied=fields.flag("tie_word_embeddings", True),
        qkv_bias=bias,
        out_bias=bias,
        head_norm=True,
        norm_offset=1.0,
        sandwich=True,
        embed_scale=sizes.hidden_size**0.5,
        logit_cap=fields.number("final_logit_softcapping", 0.0),
    )


def _ropes(config: Mapping[str, Any], dim: int) -> tuple[RopeParameters, ...]:
    """(global, local). In the older spelling `rope_theta`, `rope_scaling` are global, `rope_local_base_freq` local."""
    fields = Fields(config)
    length = reading.positions(fields, POSITIONS)
    whole = reading.rope(fields, dim, length, theta=THETA)
    base = fields.number("rope_local_base_freq", LOCAL_THETA)
    local = {"rope_parameters": config.get("rope_parameters")}
    return whole, reading.rope(Fields(local), dim, length, theta=base, kind="sliding_attention")
