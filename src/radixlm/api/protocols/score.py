"""This module owns `/v1/score`: how probable given continuations of a prompt are, and given tokens as the next one.

{"prompt": P, "continuations": [C, ...]} answers, for each C, the log-probability of each of its tokens after P. All are
one batch that computes the prompt once. {"query": Q, "items": [I, ...], "label_token_ids": [t, ...]} answers, for each
item, the probabilities of these tokens behind query and item (`item_first`: item and query).
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from radixlm.api import errors
from radixlm.api.limits import Json, check_count
from radixlm.api.protocols.fields import Reader
from radixlm.api.protocols.job import Job
from radixlm.api.protocols.logprobs import finite
from radixlm.api.protocols.prompts import Prompt, RawPrompt, encode, read_prompts
from radixlm.api.protocols.requests import requests_for, standing
from radixlm.api.protocols.sampling import Wish
from radixlm.api.service import Service
from radixlm.base.errors import BadRequest
from radixlm.base.request import LogprobParams, Request, TextParams
from radixlm.base.sampling import SamplingParams
from radixlm.wire.messages import Scores, TextDelta


class ScoreFields(msgspec.Struct, kw_only=True, frozen=True):
    model: str | None = None
    label_token_ids: list[int] | None = None
    apply_softmax: bool | None = None
    item_first: bool | None = None
    rid: str | None = None
    priority: int | None = None
    cache_salt: str | None = None


FIELDS = Reader(ScoreFields)


async def parse(body: Json, service: Service) -> Job:
    """A job whose answer has one entry for each continuation or item, in their order."""
    fields = FIELDS.read(body)
    if fields.model:
        service.served.check(fields.model)
    if body.get("items") is not None:
        return await _labels(body, fields, service)
    prompts, prompt_length, param = await _continued(body, service)
    for prompt, length in zip(prompts, prompt_length, strict=True):
        if len(prompt.tokens) == length:
            raise BadRequest("a continuation has no tokens: it cannot be scored", param=param)
    requests = [
        request
        for prompt, length in zip(prompts, prompt_length, strict=True)
        for request in _requests(prompt, LogprobParams(prompt_from=length), 0, fields, param, service)
    ]
    return Job(tuple(requests), requests[0].rid, False, Continuations(requests, prompt_length, service))


async def _continued(body: Json, service: Service) -> tuple[list[Prompt], list[int], str]:
    """Every continuation behind the prompt, and how many tokens of each are the prompt's."""
    for name in ("prompt", "continuations"):
        if body.get(name) is None:
            raise BadRequest(f"{name} is missing", param=name)
    raw, many = read_prompts(body["prompt"], service, "prompt")
    if many:
        raise BadRequest("prompt must be one text, or one list of token ids", param="prompt")
    (prompt,) = await encode(service, raw, "prompt")
    parts, _ = read_prompts(body["continuations"], service, "continuations")
    joined: list[RawPrompt] = []
    for part in parts:
        if isinstance(part, str) and prompt.text is not None:
            joined.append(prompt.text + part)
        else:
            own = list(service.tokenizer.encode(part, add_special_tokens=False)) if isinstance(part, str) else part
            joined.append([*prompt.tokens, *own])
    whole = await encode(service, joined, "continuations")
    found = []
    for part, candidate in zip(parts, whole, strict=True):
        kept = candidate
        if candidate.tokens[: len(prompt.tokens)] != prompt.tokens:
            # A token crosses the border: the continuation is then spelled by itself, so that the prompt stays.
            assert isinstance(part, str)
            own = service.tokenizer.encode(part, add_special_tokens=False)
            kept = Prompt((*prompt.tokens, *own))
        found.append(kept)
    return found, [len(prompt.tokens)] * len(found), "continuations"


async def _labels(body: Json, fields: ScoreFields, service: Service) -> Job:
    labels = fields.label_token_ids or []
    limits, vocab_size = service.config.limits, service.facts.model.vocab_size
    check_count(len(labels), 1, limits.max_logprobs, "label_token_ids: its length", "max-logprobs")
    if any(not 0 <= token < vocab_size for token in labels):
        raise BadRequest(f"label_token_ids: ids run from 0 to {vocab_size - 1}", param="label_token_ids")
    query = body.get("query", "")
    raw, _ = read_prompts(body["items"], service, "items")
    if not isinstance(query, str | list) or any(isinstance(item, str) != isinstance(query, str) for item in raw):
        raise BadRequest("query and items must both be texts, or both token ids", param="query")
    joined: list[Any] = [item + query if fields.item_first else query + item for item in raw]  # type: ignore[operator]
    prompts = await encode(service, joined, "items")
    asked = LogprobParams(token_ids=tuple(labels))
    requests = [request for prompt in prompts for request in _requests(prompt, asked, 1, fields, "items", service)]
    return Job(tuple(requests), requests[0].rid, False, Labels(requests, bool(fields.apply_softmax), service))


def _requests(
    prompt: Prompt, asked: LogprobParams, new: int, fields: ScoreFields, param: str, service: Service
) -> list[Request]:
    sampling = SamplingParams(max_new_tokens=new, temperature=0.0, ignore_eos=True)
    wish = Wish(sampling, seeded=True, text=TextParams(), choices=1)
    stands = standing(fields.priority, fields.cache_salt, None)
    rid = fields.rid or f"score-{uuid.uuid4().hex}"
    return requests_for(prompt, wish, asked, stands, rid=rid, param=param, service=service)


class _Whole:
    """What both forms share (see `api.sse.Form`). There are no streams of scores."""

    patient = False

    def __init__(self, requests: Sequence[Request], service: Service) -> None:
        self._requests = requests
        self._service = service

    def whole(self, results: list[TextDelta]) -> bytes:
        for delta in results:
            error = errors.of_delta(delta)
            if error is not None:
                raise error
        total = sum(len(request.tokens) for request in self._requests)
        answer = {
            "object": "score",
            "model": self._service.served.name,
            **self._scores(results),
            "usage": {"prompt_tokens": total, "completion_tokens": 0, "total_tokens": total},
        }
        return msgspec.json.encode(answer)

    def piece(self, index: int, delta: TextDelta) -> Iterator[bytes]:
        raise NotImplementedError("scores are not streamed")

    def last(self) -> Iterator[bytes]:
        raise NotImplementedError("scores are not streamed")

    def _scores(self, results: list[TextDelta]) -> dict[str, Any]:
        raise NotImplementedError


class Continuations(_Whole):
    def __init__(self, requests: Sequence[Request], lengths: Sequence[int], service: Service) -> None:
        super().__init__(requests, service)
        self._lengths = lengths

    def _scores(self, results: list[TextDelta]) -> dict[str, Any]:
        data = []
        for index, (request, delta, length) in enumerate(zip(self._requests, results, self._lengths, strict=True)):
            scores = delta.prompt_scores or Scores([], [], [])
            values = [finite(value) for value in scores.chosen if value is not None]
            assert len(values) == len(request.tokens) - length
            data.append(
                {
                    "index": index,
                    "logprob": sum(values),
                    "mean_logprob": sum(values) / len(values),
                    "token_logprobs": values,
                    "token_ids": list(request.tokens[length:]),
                    "cached_tokens": delta.stats.cached_tokens if delta.stats is not None else 0,
                }
            )
        return {"data": data}


class Labels(_Whole):
    def __init__(self, requests: Sequence[Request], softmax: bool, service: Service) -> None:
        super().__init__(requests, service)
        self._softmax = softmax

    def _scores(self, results: list[TextDelta]) -> dict[str, Any]:
        rows = []
        for delta in results:
            values = [math.exp(value) for value in (delta.scores or Scores([], [], [], [[]])).picked[0]]
            total = sum(values)
            rows.append([value / total for value in values] if self._softmax and total > 0 else values)
        return {"scores": rows}
