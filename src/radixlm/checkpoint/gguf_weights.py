"""This module owns what GGUF calls the weights of a decoder and what must be undone to get the original tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from radixlm.base.errors import StartupError
from radixlm.checkpoint.dequantize import Floats, slabs
from radixlm.checkpoint.gguf import Gguf, TensorInfo
from radixlm.checkpoint.gguf_config import MIXTRAL, architecture

_WHOLE: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
#: Gemma has a norm on both sides of attention and MLP.
_GEMMA3: Mapping[str, str] = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
#: One tensor [experts, rows, columns] in the file is many in the original: {} is the number of the expert.
_QWEN_EXPERTS: Mapping[str, str] = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_MIXTRAL_EXPERTS: Mapping[str, str] = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
#: Not a weight: it tells the rope scaling, which `gguf_config` reads.
_IGNORED = frozenset({"rope_freqs.weight"})
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor under its Hugging Face name.

    Attributes:
        heads: rows alternate between the halves of this many heads (0: they do not).
        offset: what the file added to each value.
    """

    name: str
    info: TensorInfo
    heads: int = 0
    offset: float = 0.0

    def slabs(self) -> Iterator[Floats]:
        """The original values, float32 [some rows, columns]; a vector is one row."""
        if self.heads and len(self.info.shape) == 1:  # a bias: its values move as the rows of its matrix do
            (values,) = slabs(self.info)
            yield values[:, halves_order(self.info.shape[0], self.heads)]
            return
        rows = halves_order(self.info.shape[0], self.heads) if self.heads else None
        for values in slabs(self.info, rows):
            yield values - np.float32(self.offset) if self.offset else values


def halves_order(rows: int, heads: int) -> npt.NDArray[np.int64]:
    """Where each row lies in the file. GGUF mixes the two rotary halves of a head."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).ravel()


def weights(gguf: Gguf, config: Mapping[str, Any]) -> list[Weight]:
    """Every weight of the file, in its order.

    Raises:
        StartupError: a tensor has no place in the architecture.
    """
    name, arch = architecture(gguf)
    blocks = {**_BLOCK, **_GEMMA3} if name == "gemma3" else _BLOCK
    if arch.mixture:
        blocks = {**blocks, **(_MIXTRAL_EXPERTS if arch is MIXTRAL else _QWEN_EXPERTS)}
    found: list[Weight] = []
    for info in gguf.tensors.values():
        if info.name in _IGNORED:
            continue
        stem, _, suffix = info.name.partition(".")
        target = _WHOLE.get(stem)
        match = _BLOCK_NAME.fullmatch(info.name)
        if match and match[2] in blocks:
            stem, target, suffix = match[2], f"model.layers.{int(match[1])}.{blocks[match[2]]}", match[3]
        if target is None or suffix not in ("weight", "bias"):
            raise StartupError(f"{gguf.path}: tensor {info.name!r} is not known in architecture {name!r}")
        if stem.endswith("_exps"):
            experts = gguf.metadata[f"{name}.expert_count"]
            if len(info.shape) != 3 or info.shape[0] != experts:
                raise StartupError(
                    f"{gguf.path}: tensor {info.name!r} has the shape {list(info.shape)}; "
                    f"a stack of {experts} matrices was expected"
                )
            found += _experts(info, f"{target}.{suffix}")
            continue
        if stem == "ffn_gate_inp_shexp":  # a matrix of one row
            info = replace(info, shape=(1, info.shape[-1]))
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}.get(stem, 0)
        if heads and arch.interleaved and info.shape[0] % (2 * heads):
            raise StartupError(f"{gguf.path}: tensor {info.name!r} has {info.shape[0]} rows for {heads} heads")
        found.append(
            Weight(
                f"{target}.{suffix}",
                info,
                heads=heads if arch.interleaved else 0,
                offset=arch.norm_offset if stem.endswith("norm") else 0.0,
            )
        )
    return found


def _experts(info: TensorInfo, name: str) -> Iterator[Weight]:
    """The matrices of a stack; {} in the name is the number of each."""
    experts, rows = info.shape[:2]
    for index in range(experts):
        raw = info.raw[index * rows : (index + 1) * rows]
        yield Weight(name.format(index), replace(info, shape=info.shape[1:], raw=raw))
