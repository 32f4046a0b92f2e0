"""This module owns `/api/embed` and `/api/embeddings`: vectors in Ollama's dialect."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import msgspec

from radixlm.api.limits import Json, check_sequences
from radixlm.api.protocols.fields import Reader
from radixlm.api.protocols.job import Job
from radixlm.api.protocols.ollama import check_model
from radixlm.api.protocols.ollama_form import durations
from radixlm.api.protocols.prompts import Prompt, encode
from radixlm.api.protocols.requests import Standing, pooled_requests
from radixlm.api.protocols.vectors import check_dimensions, shaped, vector_of
from radixlm.api.service import Service
from radixlm.base.errors import BadRequest
from radixlm.wire.messages import TextDelta


class EmbedFields(msgspec.Struct, kw_only=True, frozen=True):
    model: str | None = None
    input: str | list[str] | None = None
    prompt: str | None = None
    truncate: bool | None = None
    dimensions: int | None = None


FIELDS = Reader(EmbedFields)


async def embed(body: Json, service: Service) -> Job:
    """`input`: a text or a list of them. What is too long is cut, unless `truncate` is false."""
    fields = FIELDS.read(body)
    model = check_model(fields.model, service)
    if fields.input is None:
        raise BadRequest("input is missing", param="input")
    texts = [fields.input] if isinstance(fields.input, str) else fields.input
    prompts = await _prompts(texts, "input", fields.truncate is not False, service)
    return _job(prompts, EmbedForm(model, True, prompts, check_dimensions(fields.dimensions, service)), service)


async def embeddings(body: Json, service: Service) -> Job:
    """The older route: one `prompt`, whose vector keeps its own length."""
    fields = FIELDS.read(body)
    model = check_model(fields.model, service)
    if fields.prompt is None:
        raise BadRequest("prompt is missing", param="prompt")
    prompts = await _prompts([fields.prompt], "prompt", True, service)
    return _job(prompts, EmbedForm(model, False, prompts, check_dimensions(None, service)), service)


async def _prompts(texts: list[str], param: str, cut: bool, service: Service) -> list[Prompt]:
    check_sequences(len(texts), 1, service.config.limits, param)
    if not texts:
        raise BadRequest(f"{param} is empty", param=param)
    if not cut:
        return await encode(service, texts, param)
    limit = service.facts.model.context_length

    def work() -> list[Prompt]:
        made = [service.tokenizer.encode(text) for text in texts]
        # The last token may be what ends every text of this model.
        return [Prompt(tuple(ids if len(ids) <= limit else [*ids[: limit - 1], ids[-1]])) for ids in made]

    prompts = await service.workers.run(sum(map(len, texts)), work)
    if not all(prompt.tokens for prompt in prompts):
        raise BadRequest(f"{param} holds a text without tokens", param=param)
    return prompts


def _job(prompts: list[Prompt], form: EmbedForm, service: Service) -> Job:
    name = uuid.uuid4().hex
    requests = pooled_requests(prompts, service.facts.model.pooling, Standing(), rid=name, service=service)
    return Job(requests, name, False, form)


class EmbedForm:
    """The shape of an answer (see `api.sse.Form`)."""

    patient = False

    def __init__(self, model: str, many: bool, prompts: list[Prompt], dimensions: int) -> None:
        self._model = model
        self._many = many
        self._tokens = sum(len(prompt.tokens) for prompt in prompts)
        self._dimensions = dimensions

    def whole(self, results: list[TextDelta]) -> bytes:
        if not self._many:
            return msgspec.json.encode({"embedding": vector_of(results[0]).tolist()})
        vectors: list[Any] = [shaped(vector_of(delta), self._dimensions, True).tolist() for delta in results]
        stats = results[-1].stats
        spent = durations(stats.arrived if stats else 0.0, self._tokens, 0, stats)
        told = {name: spent[name] for name in ("total_duration", "load_duration", "prompt_eval_count")}
        return msgspec.json.encode({"model": self._model, "embeddings": vectors, **told})

    def piece(self, index: int, delta: TextDelta) -> Iterator[bytes]:
        return iter(())

    def last(self) -> Iterator[bytes]:
        return iter(())
