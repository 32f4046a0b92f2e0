"""This module owns the record of a run's calls, and the best hit rate that a cache could have had on it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from radixlm.lang.backends.native import Transport

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """One sequence that was computed.

    Attributes:
        space: of the cache; calls of different spaces share nothing.
        limit: tokens of the prompt that may come out of a cache: never the last one, nor those to be scored.
        hint: sent to fill the cache, not for an answer.
        started, ended: seconds.
    """

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    cached: int
    limit: int
    space: str
    hint: bool
    started: float
    ended: float


@dataclass(slots=True)
class Record:
    """The calls of one run."""

    calls: list[Call] = field(default_factory=list)

    @property
    def asked(self) -> int:
        """Prompt tokens of calls that were made for an answer."""
        return sum(len(call.prompt) for call in self.calls if not call.hint)

    @property
    def computed(self) -> int:
        """Prompt tokens that were computed, those of hints included."""
        return sum(len(call.prompt) - call.cached for call in self.calls)

    @property
    def generated(self) -> int:
        return sum(len(call.output) for call in self.calls)

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that did not have to be computed. What hints compute counts against it."""
        return 1 - self.computed / self.asked if self.asked else 0.0

    def optimum(self) -> float:
        """The hit rate of a cache that never forgets and is never asked for what is still being computed: calls one
        after another in the order of their starts, all of one space, without hints.
        """
        tree = _Tree()
        computed = 0
        for call in sorted((call for call in self.calls if not call.hint), key=lambda call: call.started):
            computed += len(call.prompt) - min(tree.match(call.prompt), call.limit)
            # the key and value of the last token are never computed
            tree.add(call.prompt + call.output[:-1])
        return 1 - computed / self.asked if self.asked else 0.0


class _Tree:
    """Every prefix of what was added."""

    def __init__(self) -> None:
        self._children: dict[tuple[int, int], int] = {}

    def match(self, tokens: Sequence[int]) -> int:
        node = 0
        for length, token in enumerate(tokens):
            child = self._children.get((node, token))
            if child is None:
                return length
            node = child
        return len(tokens)

    def add(self, tokens: Sequence[int]) -> None:
        node = 0
        for token in tokens:
            node = self._children.setdefault((node, token), len(self._children) + 1)


class Recorder:
    """A transport that keeps what passes."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.name = inner.name
        self.record = Record()

    async def ask(self, body: Json) -> Any:
        started = time.perf_counter()
        answer = await self._inner.ask({**body, "return_prompt_token_ids": True})
        ended = time.perf_counter()
        for item in answer if isinstance(answer, list) else [answer]:
            self._keep(body, item, started, ended)
        return answer

    def _keep(self, body: Json, item: Json, started: float, ended: float) -> None:
        prompt = tuple(item["prompt_token_ids"])
        scored = int(body.get("logprob_start_len", -1)) if body.get("return_logprob") else -1
        limit = len(prompt) - 1 if scored < 0 else min(len(prompt) - 1, max(scored, 1) - 1)
        hint = body["sampling_params"].get("max_new_tokens") == 0 and scored < 0
        cached = item["meta_info"].get("cached_tokens", 0)
        space = str(body.get("cache_salt", ""))
        self.record.calls.append(Call(prompt, tuple(item["output_ids"]), cached, limit, space, hint, started, ended))

    def events(self, body: Json) -> AsyncIterator[Json]:
        raise NotImplementedError("programs that are measured are not streamed")

    async def render(self, messages: list[Json], *, generate: bool, resume: bool) -> list[int]:
        return await self._inner.render(messages, generate=generate, resume=resume)

    async def encode(self, text: str) -> list[int]:
        return await self._inner.encode(text)

    async def decode(self, ids: list[int]) -> str:
        return await self._inner.decode(ids)

    async def flush(self) -> None:
        await self._inner.flush()

    async def info(self) -> Json:
        return await self._inner.info()

    async def close(self) -> None:
        await self._inner.close()
