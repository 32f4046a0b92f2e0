"""What the tests of the front-end language share: an engine that answers at once, and a backend that can be held."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from radixlm import Engine
from radixlm.lang.backends.base import ABILITIES, Answer, Backend, Scheduling
from radixlm.lang.params import Params
from radixlm.lang.prompt import Prompt


def null_engine(**options: object) -> Engine:
    """The scheduler and the cache as they are, and tokens that are a hash of what comes before them."""
    return Engine(model="smollm2", device="null", **{"max_total_tokens": 50_000, "random_seed": 1, **options})


class Held(Backend):
    """Answers no call before `open` is set. `most` is how many were in flight at once.

    Args:
        fail: raised in place of an answer.
        says: its answers; the most tokens that were asked for if not given.
    """

    name, can = "a held backend", frozenset(ABILITIES)

    def __init__(
        self, scheduling: Scheduling | None = None, fail: Exception | None = None, says: str | None = None
    ) -> None:
        super().__init__(scheduling)
        self.open = asyncio.Event()
        self.prompts: list[Prompt] = []
        self.prefilled: list[Prompt] = []
        self.most = self.now = 0
        self._fail = fail
        self._says = says

    async def generate(self, prompt: Prompt, params: Params) -> list[Answer]:
        self.prompts.append(prompt)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await self.open.wait()
        finally:
            self.now -= 1
        if self._fail is not None:
            raise self._fail
        text = f"<{params.max_new_tokens}>" if self._says is None else self._says
        return [Answer(text)] * (params.n or 1)

    async def stream(self, prompt: Prompt, params: Params) -> AsyncIterator[Answer]:
        (answer,) = await self.generate(prompt, params)
        for end in range(1, len(answer.text) + 1):
            yield Answer(answer.text[:end])

    async def prefill(self, prompt: Prompt) -> None:
        self.prefilled.append(prompt)
