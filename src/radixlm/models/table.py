"""This module owns the table of architectures: which family builds what a checkpoint's config names."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

from radixlm.base.errors import StartupError
from radixlm.models.base import EncoderFamily, Family

#: Architecture -> module. A module is imported when a model needs it.
FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "LlamaForCausalLM": "radixlm.models.llama",
        "MistralForCausalLM": "radixlm.models.mistral",
        "Qwen2ForCausalLM": "radixlm.models.qwen2",
        "Qwen3ForCausalLM": "radixlm.models.qwen3",
        "MixtralForCausalLM": "radixlm.models.mixtral",
        "Qwen2MoeForCausalLM": "radixlm.models.qwen2_moe",
        "Qwen3MoeForCausalLM": "radixlm.models.qwen3_moe",
        "Gemma3ForCausalLM": "radixlm.models.gemma3",
        "Gemma3TextModel": "radixlm.models.gemma3",
    }
)
#: The same for models that read whole texts at once, and only make vectors of them.
ENCODERS: Mapping[str, str] = MappingProxyType(
    {
        "BertModel": "radixlm.models.bert",
        "RobertaModel": "radixlm.models.bert",
        "XLMRobertaModel": "radixlm.models.bert",
    }
)
#: What else transformers can do runs through this one.
FALLBACK = "radixlm.models.hf"


def architecture(config: Mapping[str, Any]) -> str:
    """The name of the model class in a config.

    Raises:
        StartupError: there is none.
    """
    names = config.get("architectures")
    if not isinstance(names, list | tuple) or not names or not isinstance(names[0], str):
        raise StartupError("config.json has no 'architectures', so it is not known what kind of model this is")
    return names[0]


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Whether the model only makes vectors. Raises as `architecture`."""
    return architecture(config) in ENCODERS


def find_encoder(config: Mapping[str, Any]) -> EncoderFamily:
    """The family that builds this encoder."""
    return cast(EncoderFamily, importlib.import_module(ENCODERS[architecture(config)]))


def find(config: Mapping[str, Any]) -> Family:
    """The family that builds this model.

    Raises:
        StartupError: nothing here or in transformers knows the architecture; the message lists what is known.
    """
    name = architecture(config)
    if name in FAMILIES:
        return cast(Family, importlib.import_module(FAMILIES[name]))
    fallback = importlib.import_module(FALLBACK)
    if fallback.supports(name):
        return cast(Family, fallback)
    raise StartupError(
        f"the architecture {name} is not known; known: {', '.join((*FAMILIES, *ENCODERS))}, and decoders of "
        "transformers that use its attention interface"
    )
