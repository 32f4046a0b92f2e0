"""This module owns one spelling for what `config.json` files spell in several ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Decoder class by the `model_type` of a multimodal model's `text_config`, which rarely names it.
_TEXT_CLASSES: Mapping[str, str] = {
    "gemma3_text": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


def normalise(config: Mapping[str, Any]) -> dict[str, Any]:
    """A flat config of the language model.

    - A multimodal config is replaced by its `text_config`, which inherits what only the outer level says.
    - `torch_dtype` is there if `dtype` is, and `rope_theta`, `rope_scaling`, `rope_local_base_freq` if
      `rope_parameters` is.
    - `rope_scaling` spells its kind `rope_type`, and is None if it scales nothing.
    """
    flat = _text_level(config)
    if flat.get("torch_dtype") is None and flat.get("dtype") is not None:
        flat["torch_dtype"] = flat["dtype"]
    _flatten_rope(flat)
    return flat


def _text_level(config: Mapping[str, Any]) -> dict[str, Any]:
    text = config.get("text_config")
    if not isinstance(text, dict):
        return dict(config)
    outer = {key: value for key, value in config.items() if not key.endswith("_config") or key == "quantization_config"}
    flat = {**outer, **{key: value for key, value in text.items() if value is not None or key not in outer}}
    named = text.get("architectures") or _TEXT_CLASSES.get(text.get("model_type", ""))
    if named:
        flat["architectures"] = [named] if isinstance(named, str) else named
    return flat


def _flatten_rope(flat: dict[str, Any]) -> None:
    parameters = flat.get("rope_parameters")
    if isinstance(parameters, dict):
        whole = parameters.get("full_attention", parameters)
        local = parameters.get("sliding_attention")
        if isinstance(whole, dict):
            _default(flat, "rope_theta", whole.get("rope_theta"))
            _default(flat, "rope_scaling", {key: value for key, value in whole.items() if key != "rope_theta"})
        if isinstance(local, dict):
            _default(flat, "rope_local_base_freq", local.get("rope_theta"))
    scaling = flat.get("rope_scaling")
    if isinstance(scaling, dict):
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        flat["rope_scaling"] = None if kind == "default" else {**scaling, "rope_type": kind}


def _default(flat: dict[str, Any], key: str, value: Any) -> None:
    if flat.get(key) is None and value is not None:
        flat[key] = value
