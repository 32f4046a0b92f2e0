"""This module owns the last step of every dialect: from a prompt and a wish to the `Request`s that the engine sees."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from radixlm.api.limits import check_name
from radixlm.api.protocols.prompts import Prompt
from radixlm.api.protocols.sampling import Wish, fitted, seed_of
from radixlm.api.service import Service
from radixlm.base.errors import BadRequest
from radixlm.base.request import LogprobParams, PoolingKind, Request
from radixlm.base.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Standing:
    """How requests of one call stand towards others: their place in the queue and in the prefix cache."""

    priority: int = 0
    namespace: str = ""


def standing(priority: int | None, salt: str | None, extra: str | None) -> Standing:
    """Requests share cached prefixes only with those of the same salt and extra key."""
    if priority is not None and abs(priority) >= 1 << 31:
        raise BadRequest(f"priority is {priority}; it must fit in 32 bits", param="priority")
    parts = [check_name(salt or "", "cache_salt"), check_name(extra or "", "extra_key")]
    return Standing(priority or 0, "\n".join(parts) if any(parts) else "")


def requests_for(
    prompt: Prompt,
    wish: Wish,
    logprobs: LogprobParams | None,
    stands: Standing,
    *,
    rid: str,
    param: str,
    service: Service,
) -> list[Request]:
    """One request for each choice; uids are the hub's business.

    Args:
        param: the field that the prompt came in, for the error about one that is too long.

    Raises:
        BadRequest: the prompt is too long, or the model only makes vectors.
    """
    if not service.facts.model.generates:
        raise BadRequest(
            f"{service.served.name} makes vectors of texts and continues none; use /v1/embeddings", param="model"
        )
    try:
        sampling = fitted(wish.sampling, len(prompt.tokens), service.facts.model.context_length)
    except BadRequest as error:
        error.param = param
        raise
    text = wish.text
    if text.min_new_tokens != sampling.min_new_tokens:  # it was cut to the room in the context
        text = msgspec.structs.replace(text, min_new_tokens=sampling.min_new_tokens)
    seed = sampling.seed if wish.seeded else service.seeds.draw()
    now = time.time()
    limit = service.config.schedule.request_timeout
    return [
        Request(
            uid=0,
            rid=rid,
            tokens=prompt.tokens,
            sampling=msgspec.structs.replace(sampling, seed=seed_of(seed, choice)),
            text=text,
            logprobs=logprobs,
            grammar=wish.grammar,
            namespace=stands.namespace,
            priority=stands.priority,
            arrival=now,
            deadline=now + limit if limit else 0.0,
        )
        for choice in range(wish.choices)
    ]


def pooled_requests(
    prompts: Sequence[Prompt], pooling: PoolingKind, stands: Standing, *, rid: str, service: Service
) -> tuple[Request, ...]:
    """A request for the vector of each prompt."""
    now = time.time()
    limit = service.config.schedule.request_timeout
    return tuple(
        Request(
            uid=0,
            rid=rid,
            tokens=prompt.tokens,
            sampling=SamplingParams(max_new_tokens=0),
            namespace=stands.namespace,
            priority=stands.priority,
            arrival=now,
            deadline=now + limit if limit else 0.0,
            pooling=pooling,
        )
        for prompt in prompts
    )
