"""This module owns what handlers share: the model as this process knows it, seeds, and threads for long texts."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from radixlm import __version__
from radixlm.api.hub import Hub
from radixlm.api.sessions import Sessions
from radixlm.base.errors import BadRequest, NotFound
from radixlm.base.facts import EngineFacts
from radixlm.base.sampling import SamplingParams
from radixlm.config.schema import Config
from radixlm.text.parsers.choose import Formats
from radixlm.text.template import ChatTemplate
from radixlm.text.tokenizer import Tokenizer

R = TypeVar("R")

log = logging.getLogger("radixlm.api")

#: Longer texts are tokenized or rendered in a thread: a millisecond or so is all that the event loop gives away.
INLINE_CHARACTERS = 4096

SEED_BITS = 63


@dataclass(frozen=True, slots=True)
class Served:
    """The model as the api process knows it.

    Attributes:
        names: what clients may call it; the first is what answers say.
        template: None where the model has no chat template.
        sampling: default sampling parameters under their native names, for what a request leaves out.
        formats: in which the model writes tool calls and reasoning.
    """

    names: tuple[str, ...]
    tokenizer: Tokenizer
    template: ChatTemplate | None
    sampling: Mapping[str, float | int]
    formats: Formats = field(default_factory=Formats)

    @property
    def name(self) -> str:
        return self.names[0]

    def check(self, asked: str) -> None:
        """Raises `NotFound` for a model that is not this one. The name asked for is not repeated: it may be a path."""
        if asked not in self.names:
            raise NotFound(
                f"the model asked for is not served here; this server has {self.name!r}",
                param="model",
                code="model_not_found",
            )


#: The sampling parameters that are taken from a checkpoint's generation_config.json.
GENERATION_CONFIG_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, float | int]:
    """Default sampling parameters of a checkpoint. There, `top_k` 0 means off. Values out of range are passed over."""
    found: dict[str, float | int] = {}
    for name in GENERATION_CONFIG_FIELDS:
        value = generation_config.get(name)
        if value is None or (name == "top_k" and value == 0):
            continue
        try:
            msgspec.convert({name: value}, SamplingParams).check(vocab_size=1)
        except (msgspec.ValidationError, BadRequest) as error:
            log.warning("ignoring %s of generation_config.json: %s", name, error)
        else:
            found[name] = value
    return found


class Seeds:
    """Draws a seed for each prompt that brings none: from `--random-seed`, else from the system's entropy."""

    def __init__(self, seed: int | None) -> None:
        self._random = random.Random(seed) if seed is not None else secrets.SystemRandom()

    def draw(self) -> int:
        return self._random.getrandbits(SEED_BITS)


class Workers:
    """A few threads for work on long texts, so that the event loop goes on answering."""

    def __init__(self, threads: int = 2) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="radixlm-text")

    async def run(self, characters: int, work: Callable[[], R]) -> R:
        """`work()`, in a thread if it is about many characters."""
        if characters <= INLINE_CHARACTERS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _also_named(served: Served, asked: str) -> Served:
    """A model without a name of the operator's choice also answers to what the operator called it at the start."""
    return dataclasses.replace(served, names=tuple(dict.fromkeys((*served.names, asked))))


class Service:
    """Everything a handler needs, in one place."""

    def __init__(self, hub: Hub, served: Served, config: Config) -> None:
        self.hub = hub
        self.served = served if config.model.served_model_name else _also_named(served, config.model.model)
        self.config = config
        self.workers = Workers()
        self.sessions = Sessions(hub)
        self.seeds = Seeds(config.model.random_seed)
        self.created = int(time.time())
        self.version = __version__
        self.fingerprint = f"radixlm-{self.version}"

    @property
    def tokenizer(self) -> Tokenizer:
        return self.served.tokenizer

    @property
    def facts(self) -> EngineFacts:
        return self.hub.facts
