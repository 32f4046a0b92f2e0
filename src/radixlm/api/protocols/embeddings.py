"""This module owns `/v1/embeddings` and `/encode`: texts or token ids in, one vector for each out."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from radixlm.api.limits import Json, check_name
from radixlm.api.protocols.fields import Reader, refuse
from radixlm.api.protocols.job import Job
from radixlm.api.protocols.prompts import Prompt, encode, read_prompts
from radixlm.api.protocols.requests import pooled_requests, standing
from radixlm.api.protocols.vectors import check_dimensions, read_pooling, shaped, vector_of
from radixlm.api.service import Service
from radixlm.base.errors import BadRequest
from radixlm.wire.messages import TextDelta

#: Refused when set: each would change the vectors if it were ignored.
REFUSED = {
    "truncate_prompt_tokens": "cut prompts",
    "messages": "embeddings of chats",
    "lora_path": "adapters",
    "image_data": "images",
}


class EmbeddingFields(msgspec.Struct, kw_only=True, frozen=True):
    model: str | None = None
    dimensions: int | None = None
    encoding_format: str | None = None
    pooling: str | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    rid: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    extra_key: str | None = None


FIELDS = Reader(EmbeddingFields, {"rid": "rid", "request_id": "rid"})


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct, frozen=True):
    object: str
    index: int
    embedding: list[float] | str


class Embeddings(msgspec.Struct, frozen=True):
    object: str
    data: list[Embedding]
    model: str
    usage: Usage
    id: str


async def parse(body: Json, service: Service) -> Job:
    """OpenAI's dialect."""
    fields = FIELDS.read(body)
    if not fields.model:
        raise BadRequest("model is missing; GET /v1/models lists what is served", param="model")
    if fields.encoding_format not in (None, "float", "base64"):
        raise BadRequest(
            f"encoding_format is {fields.encoding_format[:40]!r}; it must be float or base64", param="encoding_format"
        )
    prompts, _ = await _prompts(body, ("input",), fields, service)
    name = check_name(fields.rid or "", FIELDS.public("rid", body)) or f"embd-{uuid.uuid4().hex}"
    form = OpenAiForm(name, prompts, fields, service)
    return _job(name, prompts, fields, form, service)


async def parse_native(body: Json, service: Service) -> Job:
    """The server's own dialect: `text` or `input_ids`, one or a list of them."""
    fields = FIELDS.read(body)
    prompts, many = await _prompts(body, ("text", "input_ids"), fields, service)
    name = check_name(fields.rid or "", FIELDS.public("rid", body)) or uuid.uuid4().hex
    return _job(name, prompts, fields, NativeForm(name, prompts, many, fields, service), service)


async def _prompts(
    body: Json, names: Sequence[str], fields: EmbeddingFields, service: Service
) -> tuple[list[Prompt], bool]:
    refuse(body, REFUSED)
    if fields.model:
        service.served.check(fields.model)
    given = [name for name in names if body.get(name) is not None]
    if len(given) != 1:
        raise BadRequest(
            f"{' or '.join(names)} is missing" if not given else f"give one of {', '.join(names)}", param=names[0]
        )
    (param,) = given
    raw, many = read_prompts(body[param], service, param)
    prompts = await encode(service, raw, param, add_special_tokens=fields.add_special_tokens is not False)
    return prompts, many


def _job(name: str, prompts: list[Prompt], fields: EmbeddingFields, form: VectorForm, service: Service) -> Job:
    stands = standing(fields.priority, fields.cache_salt, fields.extra_key)
    requests = pooled_requests(prompts, read_pooling(fields.pooling, service), stands, rid=name, service=service)
    return Job(requests, name, False, form)


class VectorForm:
    """What both shapes of an answer share (see `api.sse.Form`). Vectors do not stream."""

    patient = False

    def __init__(self, prompts: list[Prompt], fields: EmbeddingFields, service: Service) -> None:
        self._counts = [len(prompt.tokens) for prompt in prompts]
        self._dimensions = check_dimensions(fields.dimensions, service)
        self._normalize = fields.normalize is not False
        self._base64 = fields.encoding_format == "base64"

    def vectors(self, results: list[TextDelta]) -> list[list[float] | str]:
        made = [shaped(vector_of(delta), self._dimensions, self._normalize) for delta in results]
        if self._base64:
            return [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in made]
        return [vector.tolist() for vector in made]

    def whole(self, results: list[TextDelta]) -> bytes:
        raise NotImplementedError

    def piece(self, index: int, delta: TextDelta) -> Iterator[bytes]:
        return iter(())

    def last(self) -> Iterator[bytes]:
        return iter(())


class OpenAiForm(VectorForm):
    def __init__(self, name: str, prompts: list[Prompt], fields: EmbeddingFields, service: Service) -> None:
        super().__init__(prompts, fields, service)
        self._id = name
        self._model = service.served.name

    def whole(self, results: list[TextDelta]) -> bytes:
        data = [Embedding("embedding", index, vector) for index, vector in enumerate(self.vectors(results))]
        total = sum(self._counts)
        return msgspec.json.encode(Embeddings("list", data, self._model, Usage(total, total), self._id))


class NativeForm(VectorForm):
    def __init__(self, name: str, prompts: list[Prompt], many: bool, fields: EmbeddingFields, service: Service) -> None:
        super().__init__(prompts, fields, service)
        self._id = name
        self._many = many

    def whole(self, results: list[TextDelta]) -> bytes:
        answers: list[dict[str, Any]] = []
        for index, (vector, delta) in enumerate(zip(self.vectors(results), results, strict=True)):
            meta = {
                "id": f"{self._id}_{index}" if self._many else self._id,
                "prompt_tokens": self._counts[index],
                "cached_tokens": delta.stats.cached_tokens if delta.stats else 0,
            }
            answers.append({"embedding": vector, "meta_info": meta})
        return msgspec.json.encode(answers if self._many else answers[0])
