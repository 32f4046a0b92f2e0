"""This module owns the step from what a client says about sampling and stopping to valid parameters."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from radixlm.api.limits import Json, check_count
from radixlm.api.protocols.constraints import read_grammar
from radixlm.api.protocols.fields import Reader
from radixlm.api.service import Service
from radixlm.base.errors import BadRequest, ContextLengthExceeded
from radixlm.base.request import Grammar, TextParams
from radixlm.base.sampling import MAX_SEED, SamplingParams
from radixlm.config.schema import LimitsConfig
from radixlm.text.stop import compile_stops

#: A token id as the key of an object.
TOKEN_ID = re.compile(r"-?[0-9]{1,18}")

MAX_STREAM_INTERVAL = 1 << 20


class SamplingFields(msgspec.Struct, kw_only=True, frozen=True):
    """How tokens are chosen, under native names. None: the client did not say."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str | int, float] | None = None
    n: int | None = None


class TextFields(msgspec.Struct, kw_only=True, frozen=True):
    """How tokens become text and what text ends them. None: the client did not say."""

    stop: str | list[str] | None = None
    stop_regex: str | list[str] | None = None
    keep_stop: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    stream_interval: int | None = None


@dataclass(frozen=True, slots=True)
class Wish:
    """How a prompt is to be continued: valid, but not yet fitted to the prompt.

    Attributes:
        seeded: the client gave the seed; else each prompt gets one of its own.
        choices: how many continuations (`n`).
        grammar: what they must match.
    """

    sampling: SamplingParams
    seeded: bool
    text: TextParams
    choices: int
    grammar: Grammar | None = None


def read_wish(
    body: Json,
    sampling: Reader[SamplingFields],
    text: Reader[TextFields],
    *,
    stream: bool,
    max_new_tokens: int | None,
    service: Service,
) -> Wish:
    """
    Args:
        sampling, text: know what the dialect calls the fields.
        max_new_tokens: of the dialect, where the client does not say; None for the rest of the context.

    Raises:
        BadRequest: naming the field as the client wrote it.
    """
    limits = service.config.limits
    asked, asked_text = sampling.read(body), text.read(body)
    choices = check_count(
        1 if asked.n is None else asked.n, 1, limits.max_choices, sampling.public("n", body), "max-choices"
    )
    try:
        params = _sampling_params(asked, max_new_tokens, service)
    except BadRequest as error:
        raise sampling.renamed(error, body) from None
    try:
        text_params = _text_params(asked_text, stream, params.min_new_tokens, service)
    except BadRequest as error:
        raise text.renamed(error, body) from None
    grammar = read_grammar(body, lambda field: sampling.public(field, body))
    return Wish(params, asked.seed is not None, text_params, choices, grammar)


def _sampling_params(asked: SamplingFields, max_new_tokens: int | None, service: Service) -> SamplingParams:
    model = service.facts.model
    stop_token_ids = asked.stop_token_ids or []
    _check_stop_count(len(stop_token_ids), "stop_token_ids", service.config.limits)
    values: dict[str, Any] = {
        "max_new_tokens": model.context_length if max_new_tokens is None else max_new_tokens,
        **service.served.sampling,
    }
    for name in SamplingParams.__struct_fields__:
        value = getattr(asked, name)
        if value is not None:
            values[name] = value
    values["stop_token_ids"] = tuple(stop_token_ids)
    values["logit_bias"] = _logit_bias(asked.logit_bias or {})
    if values.get("top_k", -1) >= model.vocab_size:
        values["top_k"] = -1  # the whole vocabulary
    params = SamplingParams(**values)
    params.check(model.vocab_size)
    return params


def _logit_bias(bias: dict[str | int, float]) -> tuple[tuple[int, float], ...]:
    pairs = []
    for key, value in bias.items():
        if isinstance(key, str) and not TOKEN_ID.fullmatch(key):
            raise BadRequest(f"logit_bias: {key[:40]!r} is not a token id", param="logit_bias")
        pairs.append((int(key), value))
    return tuple(pairs)


def _text_params(asked: TextFields, stream: bool, min_new_tokens: int, service: Service) -> TextParams:
    limits = service.config.limits
    stop, stop_regex = _as_tuple(asked.stop), _as_tuple(asked.stop_regex)
    _check_stop_count(len(stop), "stop", limits)
    _check_stop_count(len(stop_regex), "stop_regex", limits)
    compile_stops(stop, stop_regex)
    interval = asked.stream_interval
    if interval is not None and not 1 <= interval <= MAX_STREAM_INTERVAL:
        raise BadRequest(
            f"stream_interval is {interval}; it must be between 1 and {MAX_STREAM_INTERVAL}", param="stream_interval"
        )
    return TextParams(
        stop=stop,
        stop_regex=stop_regex,
        keep_stop=bool(asked.keep_stop),
        min_new_tokens=min_new_tokens,
        skip_special_tokens=asked.skip_special_tokens is not False,
        spaces_between_special_tokens=asked.spaces_between_special_tokens is not False,
        stream=stream,
        stream_interval=interval or service.config.server.stream_interval,
    )


def _as_tuple(value: str | list[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


def _check_stop_count(count: int, param: str, limits: LimitsConfig) -> None:
    if count > limits.max_stop_strings:
        raise BadRequest(
            f"{param} has {count} entries; {limits.max_stop_strings} are allowed (--max-stop-strings)", param=param
        )


def fitted(sampling: SamplingParams, prompt_tokens: int, context_length: int) -> SamplingParams:
    """The parameters with `max_new_tokens` cut to the room that the prompt leaves in the context.

    Raises:
        ContextLengthExceeded: the prompt is too long, or leaves no room for the answer asked for.
    """
    room = context_length - prompt_tokens
    if room < 0 or (room == 0 and sampling.max_new_tokens > 0):
        hint = "" if room < 0 else ", which leaves no room for an answer"
        raise ContextLengthExceeded(
            f"the prompt has {prompt_tokens} tokens{hint}; the context length is {context_length}. Shorten the prompt"
        )
    if sampling.max_new_tokens <= room:
        return sampling
    return msgspec.structs.replace(sampling, max_new_tokens=room, min_new_tokens=min(sampling.min_new_tokens, room))


def seed_of(seed: int, choice: int) -> int:
    """The seed of one of `n` choices: the request's own for the first, one derived from it for each other."""
    if choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & MAX_SEED
