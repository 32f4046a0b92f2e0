"""This module owns the way from a program to a radixlm server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec

from radixlm.client.http import Client
from radixlm.lang.backends.base import Scheduling
from radixlm.lang.backends.native import Json, Native


class ServerTransport:
    """Bodies over HTTP."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.name = f"the server at {client.url}"

    async def ask(self, body: Json) -> Any:
        return await self._client.post("/generate", body)

    async def events(self, body: Json) -> AsyncIterator[Json]:
        async with aclosing(self._client.events("/generate", body)) as events:
            async for event in events:
                yield msgspec.json.decode(event)

    async def render(self, messages: list[Json], *, generate: bool, resume: bool) -> list[int]:
        body = {"messages": messages, "add_generation_prompt": generate, "continue_final_message": resume}
        return list((await self._client.post("/tokenize", body))["tokens"])

    async def encode(self, text: str) -> list[int]:
        return list((await self._client.post("/tokenize", {"prompt": text}))["tokens"])

    async def decode(self, ids: list[int]) -> str:
        answer = await self._client.post("/detokenize", {"tokens": ids, "skip_special_tokens": False})
        return str(answer["text"])

    async def flush(self) -> None:
        await self._client.post("/flush_cache")

    async def info(self) -> Json:
        return dict(await self._client.get("/server_info"))

    async def close(self) -> None:
        await self._client.close()


class RuntimeEndpoint(Native):
    """A radixlm server by its URL.

    Args:
        url: `http(s)://host:port`.
        timeout: seconds of silence after which a call is given up.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        timeout: float = 600.0,
        scheduling: Scheduling | None = None,
    ) -> None:
        super().__init__(ServerTransport(Client(url, api_key, timeout=timeout)), scheduling or Scheduling(limit=256))
