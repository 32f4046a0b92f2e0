"""This module owns `/generate`: the server's own dialect, single or batch, text or ids, cumulative text in streams."""

from __future__ import annotations

import difflib
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from radixlm.api.limits import Json, check_count, check_name
from radixlm.api.protocols import constraints
from radixlm.api.protocols.fields import Reader, refuse
from radixlm.api.protocols.job import Job
from radixlm.api.protocols.native_form import Generated, Look
from radixlm.api.protocols.prompts import Prompt, RawPrompt, encode, read_prompts
from radixlm.api.protocols.requests import requests_for, standing
from radixlm.api.protocols.sampling import SamplingFields, TextFields, Wish, read_wish
from radixlm.api.protocols.sessions import read_place
from radixlm.api.service import Service
from radixlm.api.sessions import TurnForm
from radixlm.base.errors import BadRequest
from radixlm.base.request import LogprobParams

MAX_NEW_TOKENS = 128

WHERE = "sampling_params."
SAMPLING = Reader(SamplingFields, {"sampling_seed": "seed", "seed": "seed"}, WHERE)
TEXT = Reader(TextFields, {"no_stop_trim": "keep_stop"}, WHERE)

#: Refused when set, at the top and in `sampling_params`: each would change the answer if it were ignored.
REFUSED = {
    "input_embeds": "embeddings as prompts",
    "image_data": "images",
    "video_data": "video",
    "audio_data": "audio",
    "lora_path": "adapters",
    "custom_logit_processor": "code in requests",
    "return_hidden_states": "hidden states",
    "return_routed_experts": "expert routing",
    "return_flat_raw_top_logprobs": "flat logprob arrays",
    "return_sampling_mask": "sampling masks",
    "return_entropy": "entropies",
    "max_thinking_tokens": "a budget for thinking",
    "bootstrap_host": "separate prefill and decode",
    "bootstrap_room": "separate prefill and decode",
}
REFUSED_SAMPLING = {
    "custom_params": "custom logit processors",
}


class NativeFields(msgspec.Struct, kw_only=True, frozen=True):
    """The body's own fields. Those typed `Any` are one value for all items, or a list with one for each."""

    model: str | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any] | None] | None = None
    rid: str | list[str] | None = None
    stream: bool | None = None
    return_logprob: bool | list[bool | None] | None = None
    logprob_start_len: int | list[int | None] | None = None
    top_logprobs_num: int | list[int | None] | None = None
    token_ids_logprob: list[Any] | None = None
    return_text_in_logprobs: bool | None = None
    return_prompt_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    session_params: dict[str, Any] | None = None


FIELDS = Reader(NativeFields)


async def parse(body: Json, service: Service) -> Job:
    fields = FIELDS.read(body)
    refuse(body, REFUSED)
    if fields.model:
        service.served.check(fields.model)
    stream = bool(fields.stream)
    raw, many, param = _prompts(body, service)
    wishes = _wishes(_sampling_items(fields, len(raw), many), stream, service)
    _check_total(wishes, param, service)
    params = fields.session_params
    if params is not None and (many or wishes[0].choices != 1):
        raise BadRequest("a turn of a session is one prompt with one answer", param="session_params")
    begins = params is None or params.get("rid") is None  # else there is a start token already
    special = fields.add_special_tokens is not False and begins
    prompts = await encode(service, raw, param, add_special_tokens=special)
    place = None if params is None else read_place(params, service)
    if place is not None:
        prompts = [Prompt(place.context + prompts[0].tokens)]
    group, rids = _rids(fields.rid, len(raw), many)
    logprobs = _logprob_items(fields, prompts, many, service)
    stands = standing(fields.priority, fields.cache_salt, fields.extra_key)
    requests = [
        request
        for prompt, wish, scores, rid in zip(prompts, wishes, logprobs, rids, strict=True)
        for request in requests_for(prompt, wish, scores, stands, rid=rid, param=param, service=service)
    ]
    look = Look(
        many=many or len(requests) > 1,
        texts=bool(fields.return_text_in_logprobs),
        prompt_ids=bool(fields.return_prompt_token_ids),
    )
    form = Generated(requests, look, service)
    if place is None:
        return Job(tuple(requests), group, stream, form)
    turn = TurnForm(form, service.sessions, place, group, prompts[0].tokens)
    request = msgspec.structs.replace(requests[0], session=place.session)
    return Job((request,), group, stream, turn, left=turn.left)


def _prompts(body: Json, service: Service) -> tuple[list[RawPrompt], bool, str]:
    """The prompts, whether they are a batch, and the field they came in."""
    given = [name for name in ("text", "input_ids") if body.get(name) is not None]
    if len(given) != 1:
        raise BadRequest("give exactly one of text and input_ids", param="text")
    (param,) = given
    raw, many = read_prompts(body[param], service, param)
    if any(isinstance(prompt, str) != (param == "text") for prompt in raw):
        raise BadRequest(
            "text is a text or a list of texts; input_ids is a list of token ids or a list of such lists", param=param
        )
    return raw, many, param


def _wishes(asked: Sequence[Json], stream: bool, service: Service) -> list[Wish]:
    """One for each item; those that share one dict share the work."""
    made: dict[int, Wish] = {}
    for params in asked:
        if id(params) not in made:
            refuse(params, REFUSED_SAMPLING)
            _check_names(params)
            made[id(params)] = read_wish(
                params, SAMPLING, TEXT, stream=stream, max_new_tokens=MAX_NEW_TOKENS, service=service
            )
    return [made[id(params)] for params in asked]


def _check_total(wishes: Sequence[Wish], param: str, service: Service) -> None:
    total, limit = sum(wish.choices for wish in wishes), service.config.limits.max_batch_items
    if total > limit:
        raise BadRequest(
            f"{param} and n ask for {total} sequences; {limit} are allowed (--max-batch-items)", param=param
        )


def _check_names(params: Json) -> None:
    """A mistyped sampling parameter is an error here: nothing but us reads this dict."""
    known = {*SAMPLING.names, *TEXT.names, *constraints.FIELDS, *REFUSED_SAMPLING}
    for name in params:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise BadRequest(f"unknown sampling parameter {name[:60]!r}{hint}", param=f"{WHERE}{name[:60]}")


def _sampling_items(fields: NativeFields, count: int, many: bool) -> list[Json]:
    if not isinstance(fields.sampling_params, list):
        return [fields.sampling_params or {}] * count
    return [params or {} for params in _per_item(fields.sampling_params, count, many, "sampling_params")]


def _per_item(value: Any, count: int, many: bool, param: str) -> list[Any]:
    """A value for each item: the list's own, or the same one for all."""
    if not isinstance(value, list):
        return [value] * count
    if not many:
        raise BadRequest(f"{param} is a list, but there is one prompt", param=param)
    if len(value) != count:
        raise BadRequest(f"{param} has {len(value)} entries for {count} prompts", param=param)
    return value


def _rids(rid: str | list[str] | None, count: int, many: bool) -> tuple[str, list[str]]:
    """The group's name and that of each item. A text given for a batch is the items' prefix."""
    if isinstance(rid, list):
        return "", [check_name(name, "rid") for name in _per_item(rid, count, many, "rid")]
    group = check_name(rid, "rid") if rid else uuid.uuid4().hex
    return group, [f"{group}_{i}" for i in range(count)] if many else [group]


def _logprob_items(
    fields: NativeFields, prompts: list[Prompt], many: bool, service: Service
) -> list[LogprobParams | None]:
    count = len(prompts)
    wanted = _per_item(fields.return_logprob, count, many, "return_logprob")
    starts = _per_item(fields.logprob_start_len, count, many, "logprob_start_len")
    tops = _per_item(fields.top_logprobs_num, count, many, "top_logprobs_num")
    ids = fields.token_ids_logprob
    nested = ids is not None and any(isinstance(entry, list) for entry in ids)
    picks = _per_item(ids, count, many, "token_ids_logprob") if nested else [ids] * count
    return [_logprob_params(*asked, service) for asked in zip(wanted, starts, tops, picks, prompts, strict=True)]


def _logprob_params(
    wanted: bool | None, start: int | None, top: int | None, ids: list[Any] | None, prompt: Prompt, service: Service
) -> LogprobParams | None:
    if not wanted:
        for value, param in ((top, "top_logprobs_num"), (ids, "token_ids_logprob")):
            if value:
                raise BadRequest(f"{param} needs return_logprob: true", param=param)
        return None
    limits = service.config.limits
    top = check_count(top or 0, 0, limits.max_logprobs, "top_logprobs_num", "max-logprobs")
    length = len(prompt.tokens)
    start = -1 if start is None else start
    if not -1 <= start <= length:
        raise BadRequest(
            f"logprob_start_len is {start}; it must be -1 (the answer alone) or at most {length}, the prompt's length",
            param="logprob_start_len",
        )
    ids = ids or []
    check_count(len(ids), 0, limits.max_logprobs, "token_ids_logprob: its length", "max-logprobs")
    vocab_size = service.facts.model.vocab_size
    if any(type(token) is not int or not 0 <= token < vocab_size for token in ids):
        raise BadRequest(f"token_ids_logprob: ids run from 0 to {vocab_size - 1}", param="token_ids_logprob")
    return LogprobParams(top=top, prompt_from=-1 if start == length else start, token_ids=tuple(ids))
