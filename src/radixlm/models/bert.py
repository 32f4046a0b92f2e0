"""This module owns encoders of BERT's shape: BERT, RoBERTa, XLM-RoBERTa and the embedding models made from them.

Post-norm blocks, learned positions, attention that sees the whole text (Devlin et al. 2018, arXiv:1810.04805).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from radixlm.base.errors import StartupError
from radixlm.layers.source import Source
from radixlm.models.base import Weights
from radixlm.models.config import Fields
from radixlm.ops import activation

#: Architectures whose positions begin behind the padding id, as RoBERTa counts them.
SHIFTED = frozenset({"RobertaModel", "XLMRobertaModel"})

PADDING = 1  # RoBERTa's `pad_token_id` where the config says none


class Norm:
    """Layer normalisation with mean, scale and bias; x [T, hidden_size]."""

    __slots__ = ("_bias", "_eps", "_weight")

    def __init__(self, source: Source, name: str, size: int, eps: float) -> None:
        self._weight = source.tensor(f"{name}.weight", size)
        self._bias = source.tensor(f"{name}.bias", size)
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (x.shape[-1],), self._weight, self._bias, self._eps)


class Packing:
    """Texts laid end to end, and the same as a batch padded to the longest: what attention over whole texts needs.

    Attributes:
        mask: [B, 1, 1, L], True where there is a token; None if nothing is padded.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        counts = torch.tensor(lengths, device=device)
        columns = torch.arange(max(lengths), device=device)
        there = columns < counts[:, None]
        starts = counts.cumsum(0) - counts
        self._source = torch.where(there, starts[:, None] + columns, 0)  # [B, L] places in the flat texts
        self._there = there
        self.mask = None if bool(there.all()) else there[:, None, None, :]

    def pad(self, flat: torch.Tensor) -> torch.Tensor:
        """[T, heads, head_dim] -> [B, heads, L, head_dim]"""
        return flat[self._source].transpose(1, 2)

    def flatten(self, padded: torch.Tensor) -> torch.Tensor:
        """[B, heads, L, head_dim] -> [T, heads * head_dim]"""
        return padded.transpose(1, 2)[self._there].flatten(1)


class Block:
    """norm(x + attention(x)), then norm(x + mlp(x))."""

    def __init__(self, source: Source, name: str, fields: Fields, hidden: int, heads: int) -> None:
        inner, eps = fields.integer("intermediate_size"), fields.number("layer_norm_eps", 1e-12)
        parts = [f"{name}.attention.self.{part}" for part in ("query", "key", "value")]
        self._qkv = source.linear(parts, [hidden] * 3, hidden, bias=True)
        self._out = source.linear([f"{name}.attention.output.dense"], [hidden], hidden, bias=True)
        self._norm = Norm(source, f"{name}.attention.output.LayerNorm", hidden, eps)
        self._up = source.linear([f"{name}.intermediate.dense"], [inner], hidden, bias=True)
        self._down = source.linear([f"{name}.output.dense"], [hidden], inner, bias=True)
        self._last_norm = Norm(source, f"{name}.output.LayerNorm", hidden, eps)
        self._activation = activation.find(fields.text("hidden_act", "gelu"))
        self._heads = heads

    def __call__(self, x: torch.Tensor, packing: Packing) -> torch.Tensor:
        qkv = self._qkv(x).view(len(x), 3 * self._heads, -1)
        q, k, v = (packing.pad(part) for part in qkv.chunk(3, dim=1))
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=packing.mask)
        x = self._norm(self._out.plus(packing.flatten(seen), x))
        return self._last_norm(self._down.plus(self._up.activated(x, self._activation), x))


class Bert:
    """Embeddings of words, positions and the first segment; norm; blocks."""

    def __init__(self, config: Mapping[str, Any], weights: Weights, dtype: torch.dtype, device: torch.device) -> None:
        fields = Fields(config)
        kind = fields.text("position_embedding_type", "absolute")
        if kind != "absolute":
            raise StartupError(f"config.json: position_embedding_type {kind!r} is not known here; known: absolute")
        self.vocab_size = fields.integer("vocab_size")
        self.hidden_size = hidden = fields.integer("hidden_size")
        self.layer_count = fields.integer("num_hidden_layers")
        heads = fields.integer("num_attention_heads")
        if hidden % heads:
            raise StartupError(f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
        source = Source(weights, dtype, device)
        prefix = next((p for p in ("bert.", "roberta.") if source.has(f"{p}embeddings.word_embeddings.weight")), "")
        at = f"{prefix}embeddings"
        positions = fields.integer("max_position_embeddings", 512)
        segments = fields.integer("type_vocab_size", 2)
        self._words = source.tensor(f"{at}.word_embeddings.weight", self.vocab_size, hidden)
        self._positions = source.tensor(f"{at}.position_embeddings.weight", positions, hidden)[_first(config) :]
        self._segment = source.tensor(f"{at}.token_type_embeddings.weight", segments, hidden)[0]
        self._norm = Norm(source, f"{at}.LayerNorm", hidden, fields.number("layer_norm_eps", 1e-12))
        names = [f"{prefix}encoder.layer.{index}" for index in range(self.layer_count)]
        self._blocks = [Block(source, name, fields, hidden, heads) for name in names]
        self._parameters = source.parameters
        self._bytes = source.bytes
        self._device = device

    def forward(self, ids: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Texts laid end to end, ids [T] int64 -> hidden states [T, hidden_size]; each text sees itself alone."""
        packing = Packing(lengths, self._device)
        positions = torch.cat([torch.arange(length, device=self._device) for length in lengths])
        x = self._norm(self._words[ids] + self._positions[positions] + self._segment)
        for block in self._blocks:
            x = block(x, packing)
        return x

    def parameter_count(self) -> int:
        return self._parameters

    def weight_bytes(self) -> int:
        return self._bytes


def context_length(config: Mapping[str, Any]) -> int:
    return Fields(config).integer("max_position_embeddings", 512) - _first(config)


def build(config: Mapping[str, Any], weights: Weights, dtype: torch.dtype, device: torch.device) -> Bert:
    return Bert(config, weights, dtype, device)


def _first(config: Mapping[str, Any]) -> int:
    """The row of the position table that a text begins with."""
    names = config.get("architectures") or [""]
    if names[0] not in SHIFTED:
        return 0
    padding = config.get("pad_token_id")
    return (padding if isinstance(padding, int) else PADDING) + 1
