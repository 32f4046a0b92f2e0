"""This module owns `/v1/rerank`: documents in the order of their likeness to a query.

The score is the cosine between the vectors of the query and of the document, whatever the model is; no model that reads
both together is needed.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from radixlm.api.limits import Json, check_name
from radixlm.api.protocols.embeddings import Usage
from radixlm.api.protocols.fields import Reader, refuse
from radixlm.api.protocols.job import Job
from radixlm.api.protocols.prompts import encode, read_prompts
from radixlm.api.protocols.requests import pooled_requests, standing
from radixlm.api.protocols.vectors import cosines, read_pooling, vector_of
from radixlm.api.service import Service
from radixlm.base.errors import BadRequest
from radixlm.wire.messages import TextDelta

REFUSED = {"instruct": "instructions for rerankers", "max_chunks_per_doc": "cut documents"}


class RerankFields(msgspec.Struct, kw_only=True, frozen=True):
    model: str | None = None
    query: str | None = None
    documents: list[Any] | None = None
    top_n: int | None = None
    return_documents: bool | None = None
    pooling: str | None = None
    rid: str | None = None
    priority: int | None = None
    cache_salt: str | None = None


FIELDS = Reader(RerankFields, {"rid": "rid", "request_id": "rid"})


class Document(msgspec.Struct, frozen=True):
    text: str


class Result(msgspec.Struct, frozen=True):
    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class Ranking(msgspec.Struct, frozen=True):
    id: str
    model: str
    results: list[Result]
    usage: Usage


async def parse(body: Json, service: Service) -> Job:
    fields = FIELDS.read(body)
    refuse(body, REFUSED)
    if fields.model:
        service.served.check(fields.model)
    if fields.query is None:
        raise BadRequest("query is missing", param="query")
    texts = _texts(fields.documents)
    if fields.top_n is not None and fields.top_n < 1:
        raise BadRequest(f"top_n is {fields.top_n}; it must be at least 1", param="top_n")
    name = check_name(fields.rid or "", FIELDS.public("rid", body)) or f"rerank-{uuid.uuid4().hex}"
    query = await encode(service, [fields.query], "query")
    documents, _ = read_prompts(texts, service, "documents")
    prompts = query + await encode(service, documents, "documents")
    stands = standing(fields.priority, fields.cache_salt, None)
    requests = pooled_requests(prompts, read_pooling(fields.pooling, service), stands, rid=name, service=service)
    total = sum(len(prompt.tokens) for prompt in prompts)
    form = Ranked(name, texts, fields.top_n, fields.return_documents is not False, total, service)
    return Job(requests, name, False, form)


def _texts(documents: list[Any] | None) -> list[str]:
    """Texts, or objects with a `text`."""
    if not documents:
        raise BadRequest("documents is missing or empty", param="documents")
    texts: list[str] = []
    for item in documents:
        text = item.get("text") if isinstance(item, dict) else item
        if not isinstance(text, str):
            raise BadRequest("documents must be texts, or objects with a text", param="documents")
        texts.append(text)
    return texts


class Ranked:
    """The shape of an answer (see `api.sse.Form`): best first; equal scores in the order of the documents."""

    patient = False

    def __init__(
        self, name: str, texts: list[str], top: int | None, with_texts: bool, tokens: int, service: Service
    ) -> None:
        self._id = name
        self._texts = texts
        self._top = top
        self._with_texts = with_texts
        self._tokens = tokens
        self._model = service.served.name

    def whole(self, results: list[TextDelta]) -> bytes:
        query, *others = [vector_of(delta) for delta in results]
        scores = cosines(query, others)
        order = sorted(range(len(scores)), key=lambda i: -scores[i])[: self._top]
        ranked = [Result(i, scores[i], Document(self._texts[i]) if self._with_texts else UNSET) for i in order]
        return msgspec.json.encode(Ranking(self._id, self._model, ranked, Usage(self._tokens, self._tokens)))

    def piece(self, index: int, delta: TextDelta) -> Iterator[bytes]:
        return iter(())

    def last(self) -> Iterator[bytes]:
        return iter(())
