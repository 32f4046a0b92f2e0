"""This module owns the translation of GGUF metadata into a Hugging Face config, and the table of architectures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from radixlm.base.errors import StartupError
from radixlm.checkpoint.dequantize import slabs
from radixlm.checkpoint.gguf import Gguf


@dataclass(frozen=True, slots=True)
class Architecture:
    """How GGUF stores a family.

    Attributes:
        interleaved: rows of q and k alternate between the two halves of a head (rotary pairs side by side).
        norm_offset: what the file adds to every norm weight.
        mixture: feed-forward parts are mixtures of experts.
    """

    hf_class: str
    model_type: str
    interleaved: bool = False
    norm_offset: float = 0.0
    mixture: bool = False


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", "llama", interleaved=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", "qwen2_moe", mixture=True),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", "qwen3_moe", mixture=True),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", norm_offset=1.0),
}


#: Mixtral calls itself Llama, with experts.
MIXTRAL = Architecture("MixtralForCausalLM", "mixtral", interleaved=True, mixture=True)


def architecture(gguf: Gguf) -> tuple[str, Architecture]:
    """Raises `StartupError` naming what is known for an architecture that is not."""
    name = gguf.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise StartupError(
            f"{gguf.path} holds a model of architecture {name!r}; GGUF files of {known} can be read. "
            "Other architectures are served from their safetensors directory."
        )
    arch = ARCHITECTURES[name]
    if gguf.metadata.get(f"{name}.expert_count", 0) and not arch.mixture:
        if name != "llama":
            raise StartupError(f"{gguf.path} is a mixture of experts of architecture {name!r}, which is known as dense")
        arch = MIXTRAL
    return name, arch


def hf_config(gguf: Gguf) -> dict[str, Any]:
    """The `config.json` that the original model would have had."""
    name, arch = architecture(gguf)
    keys = _Keys(gguf, name)
    heads, hidden = keys.integer("attention.head_count"), keys.integer("embedding_length")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(key, head_dim) != head_dim:
            raise StartupError(
                f"{gguf.path}: {name}.{key} is {keys.get(key)} and the head size {head_dim}; they must agree"
            )
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2 or embedding.shape[1] != hidden:
        raise StartupError(f"{gguf.path} holds no tensor token_embd.weight with rows of {hidden}")
    config: dict[str, Any] = {
        "architectures": [arch.hf_class],
        "model_type": arch.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(gguf, keys),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "use_cache": True,
    }
    if name == "gemma3":
        config |= _gemma3(keys, config)
    else:
        config |= {
            "hidden_act": "silu",
            "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in gguf.tensors,
        }
    if arch.mixture:
        config |= _mixture(keys, arch, config)
    return config


#: GGUF key under `rope.scaling` -> key of `rope_scaling`.
_YARN: Mapping[str, str] = {
    "attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}


class _Keys:
    """Reads `<architecture>.<key>` and says what is missing."""

    def __init__(self, gguf: Gguf, name: str) -> None:
        self._gguf = gguf
        self._name = name

    def get(self, key: str, default: Any = None) -> Any:
        return self._gguf.metadata.get(f"{self._name}.{key}", default)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if type(value) is not int or value <= 0:
            raise StartupError(f"{self._gguf.path}: key {self._name}.{key} is {value!r}; a positive integer is needed")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if type(value) not in (int, float) or not np.isfinite(value):
            raise StartupError(f"{self._gguf.path}: key {self._name}.{key} is {value!r}; a number is needed")
        # The file holds float32: its shortest decimal is what the author wrote (1e-05, not 9.99999974e-06).
        return float(str(np.float32(value)))


def _rope_scaling(gguf: Gguf, keys: _Keys) -> dict[str, Any] | None:
    if "rope_freqs.weight" in gguf.tensors:
        return _llama3_scaling(gguf, keys)
    kind = keys.get("rope.scaling.type", "none")
    if kind == "none":
        factor = keys.number("rope.scale_linear", 1.0)  # how early files spelled linear scaling
        return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    scaling: dict[str, Any] = {"rope_type": kind, "factor": keys.number("rope.scaling.factor")}
    if kind == "yarn":
        if keys.get("rope.scaling.original_context_length") is not None:
            scaling["original_max_position_embeddings"] = keys.integer("rope.scaling.original_context_length")
        for theirs, ours in _YARN.items():
            if keys.get(f"rope.scaling.{theirs}") is not None:
                scaling[ours] = keys.number(f"rope.scaling.{theirs}")
    elif kind != "linear":
        raise StartupError(f"{gguf.path} uses rope scaling {kind!r}; linear, yarn and llama3 can be read from GGUF")
    return scaling


def _llama3_scaling(gguf: Gguf, keys: _Keys) -> dict[str, Any]:
    """The file holds the divisor of each frequency instead of the rule that made them. The rule is Llama 3's with its
    published constants (arXiv:2407.21783 and the reference code); the divisors confirm it and give the factor.
    """
    stored = np.concatenate([slab.ravel() for slab in slabs(gguf.tensors["rope_freqs.weight"])])
    scaling = {
        "rope_type": "llama3",
        "factor": float(stored.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    base = keys.number("rope.freq_base", 10000.0)
    if not np.allclose(llama3_divisors(2 * len(stored), base, scaling), stored, rtol=1e-3):
        raise StartupError(f"{gguf.path}: tensor rope_freqs.weight follows no rope scaling that is known here")
    return scaling


def llama3_divisors(head_dim: int, base: float, scaling: Mapping[str, Any]) -> npt.NDArray[np.float64]:
    """What Llama 3's rope scaling divides each of the head_dim / 2 frequencies by."""
    wavelength = 2 * np.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = (scaling["original_max_position_embeddings"] / wavelength - low) / (high - low)
    smooth = np.clip(smooth, 0.0, 1.0)
    divisors: npt.NDArray[np.float64] = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    return divisors


def _mixture(keys: _Keys, arch: Architecture, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a mixture. That Qwen3 makes weights sum to 1 and Qwen2 does not is not in the file."""
    count, active = keys.integer("expert_count"), keys.integer("expert_used_count")
    if arch is MIXTRAL:
        return {"num_local_experts": count, "num_experts_per_tok": active, "sliding_window": None}
    fields = {
        "num_experts": count,
        "num_experts_per_tok": active,
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "norm_topk_prob": arch.model_type == "qwen3_moe",
    }
    if arch.model_type == "qwen2_moe":
        fields |= {
            "shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length"),
            "qkv_bias": config["attention_bias"],
        }
    return fields


def _gemma3(keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    """What the file leaves unsaid of Gemma 3: local rope base, the pattern of layers, the query scale."""
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    every = keys.integer("attention.sliding_window_pattern", 6)
    largest = layers == 62  # 27B alone scales queries by the width per head instead of the head size
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config["hidden_size"] // heads if largest else config["head_dim"],
        "sliding_window": keys.integer("attention.sliding_window"),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0),
        "layer_types": ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)],
        "attention_bias": False,
    }
