"""This module owns the way from a program to an `Engine` in this process."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import msgspec

from radixlm.base.errors import Unavailable
from radixlm.lang.backends.native import Json

if TYPE_CHECKING:
    from radixlm.llm import Engine


class EngineTransport:
    """Bodies as arguments of `Engine.async_generate`. The engine stays its owner's: it is not kept alive from here."""

    def __init__(self, engine: Engine) -> None:
        self._held = weakref.ref(engine)
        self.name = f"the engine of {engine.facts.model.name}"

    @property
    def _engine(self) -> Engine:
        engine = self._held()
        if engine is None:
            raise Unavailable(f"{self.name} is gone; keep the Engine for as long as programs run on it")
        return engine

    async def ask(self, body: Json) -> Any:
        return await self._engine.async_generate(**_arguments(body))

    async def events(self, body: Json) -> AsyncIterator[Json]:
        async for answer in await self._engine.async_generate(**_arguments(body)):
            yield answer

    async def render(self, messages: list[Json], *, generate: bool, resume: bool) -> list[int]:
        return self._engine.render(messages, add_generation_prompt=generate, continue_final_message=resume)

    async def encode(self, text: str) -> list[int]:
        return self._engine.encode(text)

    async def decode(self, ids: list[int]) -> str:
        return self._engine.decode(ids, skip_special_tokens=False)

    async def flush(self) -> None:
        await asyncio.to_thread(self._engine.flush_cache)

    async def info(self) -> Json:
        return {"engine": await asyncio.to_thread(self._engine.stats), **msgspec.to_builtins(self._engine.facts)}

    async def close(self) -> None:
        pass


def _arguments(body: Json) -> Json:
    arguments = dict(body)
    if "text" in arguments:
        arguments["prompt"] = arguments.pop("text")
    return arguments
