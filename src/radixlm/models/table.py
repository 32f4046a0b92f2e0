"""This module owns which architecture is served by which family."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from radixlm.base.errors import StartupError
from radixlm.models.base import Family

FAMILIES: Mapping[str, str] = {
    "LlamaForCausalLM": "radixlm.models.llama",
    "MistralForCausalLM": "radixlm.models.mistral",
    "Qwen2ForCausalLM": "radixlm.models.qwen2",
    "Qwen3ForCausalLM": "radixlm.models.qwen3",
    "Gemma3ForCausalLM": "radixlm.models.gemma3",
}


def find(config: Mapping[str, Any]) -> Family:
    for name in config.get("architectures") or ():
        if name in FAMILIES:
            return importlib.import_module(FAMILIES[name])  # type: ignore[return-value]
    raise StartupError(f"unknown architecture {config.get('architectures')}; known: {', '.join(FAMILIES)}")
