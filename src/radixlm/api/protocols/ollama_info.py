"""This module owns what Ollama's clients ask about models: `/api/tags`, `/api/show`, `/api/ps`, `/api/version`."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from radixlm.api.info import json_response
from radixlm.api.limits import Json
from radixlm.api.protocols.fields import Reader
from radixlm.api.protocols.ollama import check_model
from radixlm.api.service import Service

#: The version of Ollama's API that is followed: clients compare it with what they need.
API_VERSION = "0.12.6"

NEVER = "9999-12-31T23:59:59Z"


class ShowFields(msgspec.Struct, kw_only=True, frozen=True):
    model: str | None = None
    name: str | None = None


SHOW = Reader(ShowFields)


class OllamaInfo:
    """Handlers, by the name of what they tell."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def version(self, request: Request) -> Response:
        return json_response({"version": API_VERSION})

    async def tags(self, request: Request) -> Response:
        """The models that are there: the one that is served."""
        modified = datetime.fromtimestamp(self._service.created, UTC).isoformat().replace("+00:00", "Z")
        return json_response({"models": [{**self._card(), "modified_at": modified}]})

    async def running(self, request: Request) -> Response:
        """The models that are loaded."""
        facts = self._service.facts
        on_device = facts.model.weight_bytes if facts.device.kind != "cpu" else 0
        card = {**self._card(), "expires_at": NEVER, "size_vram": on_device}
        return json_response({"models": [{**card, "context_length": facts.model.context_length}]})

    def _card(self) -> Json:
        service, model = self._service, self._service.facts.model
        name = service.served.name
        identity = f"{name}\n{model.architecture}\n{model.parameters}\n{model.dtype}"
        return {
            "name": name,
            "model": name,
            "size": model.weight_bytes,
            "digest": hashlib.sha256(identity.encode()).hexdigest(),
            "details": details(service),
        }


async def show(body: Json, service: Service) -> Json:
    fields = SHOW.read(body)
    check_model(fields.model or fields.name, service)
    model = service.facts.model
    family = _family(service)
    defaults = service.served.sampling
    return {
        "modelfile": "",
        "parameters": "\n".join(f"{name} {value}" for name, value in defaults.items()),
        "template": service.served.template.source if service.served.template is not None else "",
        "details": details(service),
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": model.parameters,
            f"{family}.context_length": model.context_length,
            f"{family}.embedding_length": model.hidden_size,
            f"{family}.block_count": model.layers,
            "tokenizer.ggml.eos_token_ids": list(model.eos_ids),
        },
        "capabilities": capabilities(service),
    }


def capabilities(service: Service) -> list[str]:
    """What the model can do, as far as its template shows."""
    if not service.facts.model.generates:
        return ["embedding"]
    source = service.served.template.source if service.served.template is not None else ""
    found = ["completion"]
    if "tools" in source:
        found.append("tools")
    if "enable_thinking" in source or "<think>" in source:
        found.append("thinking")
    return found


def details(service: Service) -> Json:
    model = service.facts.model
    family = _family(service)
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": _size(model.parameters),
        "quantization_level": model.dtype.upper().replace("BFLOAT", "BF").replace("FLOAT", "F"),
    }


def _family(service: Service) -> str:
    """`LlamaForCausalLM` is of the family `llama`."""
    name = service.facts.model.architecture
    for ending in ("ForCausalLM", "ForConditionalGeneration", "Model"):
        name = name.removesuffix(ending)
    return name.lower()


def _size(parameters: int) -> str:
    if parameters >= 10**9:
        return f"{parameters / 1e9:.1f}B"
    return f"{parameters / 1e6:.2f}M"
