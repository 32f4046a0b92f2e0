"""This module owns prompts: the forms they come in, their tokens, and the check that every id is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from radixlm.api.limits import check_sequences
from radixlm.api.service import Service
from radixlm.base.errors import BadRequest, ContextLengthExceeded

RawPrompt = str | list[int]


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens of a prompt, and its text where the client sent text."""

    tokens: tuple[int, ...]
    text: str | None = None


def read_prompts(value: Any, service: Service, param: str, choices: int = 1) -> tuple[list[RawPrompt], bool]:
    """The prompts in a text, a list of texts, a list of ids or a list of such lists; and whether there may be many.

    Looks at no more than it must before it refuses something too large.
    """
    limits = service.config.limits
    if isinstance(value, str):
        check_sequences(1, choices, limits, param)
        return [value], False
    if not isinstance(value, list):
        raise BadRequest(
            f"{param} must be a text, a list of texts, a list of token ids or a list of such lists", param=param
        )
    if not value:
        raise BadRequest(f"{param} is empty", param=param)
    if isinstance(value[0], str | list):
        check_sequences(len(value), choices, limits, param)
        kind = type(value[0])
        if any(type(item) is not kind for item in value):
            raise BadRequest(f"{param} mixes forms: use texts only, or lists of token ids only", param=param)
        return value, True
    check_sequences(1, choices, limits, param)
    return [value], False


async def encode(
    service: Service, raw: Sequence[RawPrompt], param: str, *, add_special_tokens: bool = True
) -> list[Prompt]:
    """The tokens of prompts: texts are tokenized, ids checked and taken as they are, without a start token.

    Raises:
        BadRequest: a prompt without tokens, or ids that are none.
        ContextLengthExceeded: a prompt longer than the context.
    """
    vocab_size = service.facts.model.vocab_size
    context_length = service.facts.model.context_length
    tokenizer = service.tokenizer

    def work() -> list[Prompt]:
        prompts = []
        for prompt in raw:
            if isinstance(prompt, str):
                ids = tokenizer.encode_limited(prompt, context_length, add_special_tokens=add_special_tokens)
                prompts.append(Prompt(tuple(ids), prompt))
            else:
                prompts.append(Prompt(check_ids(prompt, vocab_size, context_length, param)))
            if not prompts[-1].tokens:
                raise BadRequest("the prompt is empty: it has no tokens", param=param)
        return prompts

    size = sum(map(len, raw))
    try:
        return await service.workers.run(size, work)
    except ContextLengthExceeded as error:
        raise ContextLengthExceeded(error.message, param=param) from None


def check_ids(ids: list[Any], vocab_size: int, context_length: int, param: str) -> tuple[int, ...]:
    """The ids as a tuple. Raises for what is no id of the vocabulary; a list that is too long is not read."""
    if len(ids) > context_length:
        raise ContextLengthExceeded(
            f"the prompt has {len(ids)} tokens; the context length is {context_length}. Shorten the prompt", param=param
        )
    # Prompts of thousands of ids are common: everything here is one pass in C.
    if ids and set(map(type, ids)) != {int}:
        raise BadRequest(f"{param}: token ids must be integers", param=param)
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        token = next(token for token in ids if not 0 <= token < vocab_size)
        raise BadRequest(
            f"{param} holds token id {token}, out of vocabulary: ids run from 0 to {vocab_size - 1}", param=param
        )
    return tuple(ids)
