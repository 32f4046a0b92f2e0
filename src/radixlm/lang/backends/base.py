"""This module owns `Backend`: what a program needs of whoever computes its texts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from radixlm.base.errors import NotServed
from radixlm.lang.gate import Gate
from radixlm.lang.ir import Expr, Gen, Image, Reasoning, RoleBegin, Select
from radixlm.lang.params import GRAMMARS, Params
from radixlm.lang.prompt import Prompt

#: What a backend may be able to do -> how an error calls it.
ABILITIES: Mapping[str, str] = {
    "text": "prompts that are plain text; put them into roles (system, user, assistant)",
    "chat": "roles",
    "images": "images: its model reads text alone",
    "select": "select: it does not tell the log-probabilities of a prompt",
    "logprobs": "return_logprob",
    "prompt_logprobs": "logprob_start_len",
    "regex": "regex (nor dtype, gen_int and gen_string, which are one)",
    "json_schema": "json_schema",
    "ebnf": "ebnf",
    "n": "several texts at once (n)",
    "continue": "an assistant's message that is begun by the program and ended by the model",
}


@dataclass(frozen=True, slots=True)
class Scheduling:
    """How calls are sent. The defaults are right; the others are for measuring what each is worth.

    Attributes:
        limit: calls in flight at once.
        hints: compute a shared prefix before those who share it start.
        parallel: calls of one program may be in flight together.
        apart: programs share no cache, only the calls of one program do.
    """

    limit: int = 1024
    hints: bool = True
    parallel: bool = True
    apart: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """A generated text (so far) and what the backend tells of it."""

    text: str
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Scored:
    """Log-probabilities of the tokens of a choice after the prompt, and of the same tokens without it.

    Attributes:
        ids: the tokens. Those of all choices begin where the first of them departs from the prompt's.
        given: log P(token | prompt, tokens before).
        alone: log P(token | tokens before), empty if it was not asked for. The first one is 0 if nothing precedes it.
    """

    ids: tuple[int, ...]
    given: tuple[float, ...]
    alone: tuple[float, ...] = ()


class Backend(ABC):
    """
    Attributes:
        name: for the reader of errors.
        can: of `ABILITIES`.
        metered: every call costs its whole prompt again, so few long calls are better than many short ones.
    """

    name: str
    can: frozenset[str]
    metered = False

    def __init__(self, scheduling: Scheduling | None = None) -> None:
        self.scheduling = scheduling or Scheduling()
        self.gate = Gate(self.scheduling.limit, None if self.scheduling.parallel else 1)

    def check(self, node: Expr, *, chat: bool | None = None) -> None:
        """Raise `NotServed` if a node asks for what this backend cannot do. No call is made.

        Args:
            chat: whether it stands within a chat; None if nobody knows.
        """
        for ability in _needs(node, chat):
            if ability not in self.can:
                raise NotServed(f"{self.name} cannot do {ABILITIES[ability]}")
        if isinstance(node, Gen):
            self.check_params(node.params)

    def check_params(self, params: Params) -> None:  # noqa: B027  most take all of them
        """Raise `NotServed` for a sampling parameter that cannot be passed on."""

    @abstractmethod
    async def generate(self, prompt: Prompt, params: Params) -> list[Answer]:
        """The continuation of a prompt, `n` of them."""

    @abstractmethod
    def stream(self, prompt: Prompt, params: Params) -> AsyncIterator[Answer]:
        """The continuation as it comes: every answer has the whole text so far, the last one is complete."""

    async def prefill(self, prompt: Prompt) -> None:  # noqa: B027  not every backend has a cache to fill
        """Have a prompt in the cache. Does nothing where there is none to fill."""

    async def score(self, prompt: Prompt, choices: Sequence[str], *, alone: bool) -> list[Scored]:
        """What the model thinks of each choice after the prompt."""
        raise NotServed(f"{self.name} cannot do {ABILITIES['select']}")

    async def text(self, prompt: Prompt) -> str:
        """A prompt as text. Where no template is known, a plain one: `role: text` and a blank line."""
        if not prompt.chat:
            return prompt.text
        done = "".join(f"{message.role}: {message.text}\n\n" for message in prompt.messages)
        return done if prompt.open is None else f"{done}{prompt.open.role}: {prompt.open.text}"

    async def flush_cache(self) -> None:
        raise NotServed(f"{self.name} has no cache to flush")

    async def server_info(self) -> dict[str, Any]:
        return {"name": self.name}

    async def close(self) -> None:  # noqa: B027  not every backend holds any
        """Let go of connections."""


def _needs(node: Expr, chat: bool | None) -> list[str]:
    if isinstance(node, RoleBegin):
        return ["chat"]
    if isinstance(node, Image):
        return ["images"]
    if isinstance(node, Reasoning):
        return [need for item in node.items for need in _needs(item, chat)]
    place = ["text"] if chat is False else []
    if isinstance(node, Select):
        return [*place, "select"]
    if isinstance(node, Gen):
        said = node.params
        wanted = {
            "logprobs": said.return_logprob,
            "prompt_logprobs": said.return_logprob and (said.logprob_start_len or -1) >= 0,
            "n": said.n is not None and said.n > 1,
            **{name: getattr(said, name) for name in GRAMMARS},
        }
        return [*place, *(name for name, value in wanted.items() if value)]
    return []
