"""This module owns the Mistral family: Llama's shape, with a sliding window in every layer where one is configured."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from radixlm.models import config as reading
from radixlm.models import llama
from radixlm.models.base import Weights
from radixlm.models.config import Fields
from radixlm.models.decoder import Decoder, DecoderSpec
from radixlm.parallel.base import Comm
from radixlm.parallel.local import ALONE

POSITIONS = 131_072
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
    return Decoder(spec(config), weights, dtype, device, comm, fixed)


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    """`sliding_window` null means none; left out, it is 4096."""
    fields = Fields(config)
    window = fields.integer("sliding_window", WINDOW) if config.get("sliding_window", WINDOW) is not None else 0
    plain = llama.spec({"max_position_embeddings": POSITIONS, **config})
    attention = tuple(dataclasses.replace(layer, window=window) for layer in plain.attention)
    return dataclasses.replace(plain, attention=attention)
