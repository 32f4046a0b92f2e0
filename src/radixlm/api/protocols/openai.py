"""This module owns what OpenAI's two generating dialects share: names of fields, refused fields, usage."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from radixlm.api import errors
from radixlm.api.hub import Stage
from radixlm.api.limits import Json, check_name
from radixlm.api.protocols.fields import Reader
from radixlm.api.protocols.prompts import Prompt
from radixlm.api.protocols.requests import Standing, requests_for, standing
from radixlm.api.protocols.sampling import SamplingFields, TextFields, Wish, read_wish
from radixlm.api.protocols.tally import Counts
from radixlm.api.service import Service
from radixlm.base.errors import BadRequest
from radixlm.base.request import LogprobParams, Request
from radixlm.wire.messages import TextDelta

SAMPLING = Reader(
    SamplingFields,
    {
        "max_completion_tokens": "max_new_tokens",
        "max_tokens": "max_new_tokens",
        "min_tokens": "min_new_tokens",
    },
)
TEXT = Reader(TextFields, {"include_stop_str_in_output": "keep_stop", "no_stop_trim": "keep_stop"})

#: Refused when set: each would change the answer if it were ignored. Everything else that is unknown is ignored.
UNSERVED: Mapping[str, str] = {
    "lora_path": "adapters",
    "session_params": "sessions",
    "custom_logit_processor": "code in requests",
    "logits_processors": "code in requests",
    "use_beam_search": "beam search",
    "bad_words": "banned words",
    "allowed_token_ids": "a restricted vocabulary",
    "truncate_prompt_tokens": "cut prompts",
    "prompt_embeds": "embeddings as prompts",
    "return_hidden_states": "hidden states",
}


class CommonFields(msgspec.Struct, kw_only=True, frozen=True):
    """What both dialects take besides sampling and text."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    rid: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    return_token_ids: bool | None = None


class StreamOptions(msgspec.Struct, kw_only=True, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


COMMON = Reader(CommonFields, {"rid": "rid", "request_id": "rid"})


@dataclass(frozen=True, slots=True)
class Common:
    """A request's shared part, read and valid. `rid` is also the id of the answer."""

    rid: str
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    standing: Standing
    wish: Wish


def read_common(body: Json, service: Service, *, id_prefix: str, max_new_tokens: int | None) -> Common:
    """Read and check everything but prompt and logprobs.

    Args:
        max_new_tokens: where the client does not say; None for the rest of the context.
    """
    fields = COMMON.read(body)
    if not fields.model:
        raise BadRequest("model is missing; GET /v1/models lists what is served", param="model")
    service.served.check(fields.model)
    if fields.stream_options is not None and not fields.stream:
        raise BadRequest("stream_options is only allowed with stream: true", param="stream_options")
    options = fields.stream_options or StreamOptions()
    stream = bool(fields.stream)
    name = check_name(fields.rid or "", COMMON.public("rid", body))
    return Common(
        rid=name or f"{id_prefix}-{uuid.uuid4().hex}",
        stream=stream,
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
        return_token_ids=bool(fields.return_token_ids),
        standing=standing(fields.priority, fields.cache_salt, fields.extra_key),
        wish=read_wish(body, SAMPLING, TEXT, stream=stream, max_new_tokens=max_new_tokens, service=service),
    )


def make_requests(
    common: Common, prompts: Sequence[Prompt], logprobs: LogprobParams | None, service: Service, param: str
) -> list[Request]:
    """Every choice of prompt 0, then every choice of prompt 1, ..."""
    return [
        request
        for prompt in prompts
        for request in requests_for(
            prompt, common.wish, logprobs, common.standing, rid=common.rid, param=param, service=service
        )
    ]


# ---- answers


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class CompletionDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


def usage_of(counts: Counts) -> Usage:
    return Usage(
        counts.prompt,
        counts.completion,
        counts.prompt + counts.completion,
        PromptDetails(counts.cached),
        CompletionDetails(counts.reasoning),
    )


@dataclass(frozen=True, slots=True)
class Frame:
    """What every chunk of one answer repeats."""

    id: str
    created: int
    model: str
    fingerprint: str


def frame(common: Common, service: Service) -> Frame:
    return Frame(common.rid, int(time.time()), service.served.name, service.fingerprint)


def raise_failure(delta: TextDelta, service: Service) -> None:
    """OpenAI's answers have no finish reason for a sequence that failed or was aborted: it is an error."""
    error = errors.of_delta(delta, draining=service.hub.stage is Stage.DRAINING)
    if error is not None:
        raise error
