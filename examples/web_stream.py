"""A web handler that streams what a program writes: `python examples/web_stream.py`, then

curl -N "http://127.0.0.1:8000/?topic=rivers"
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

import radixlm as rl


@rl.function
def poem(s: Any, topic: str) -> None:
    s += rl.user("Write a short poem about " + topic + ".")
    s += rl.assistant(rl.gen("poem", max_tokens=80))


def make_app(backend: Any) -> Starlette:
    async def handle(request: Request) -> StreamingResponse:
        state = poem.run(request.query_params.get("topic", "the sea"), backend=backend, stream=True, temperature=0)

        async def body() -> AsyncIterator[str]:
            try:
                async for piece in state.text_async_iter("poem"):
                    yield piece
            except rl.ProgramError as error:
                yield f"\n[{error.message}]"
            finally:
                state.cancel()  # a client that has gone needs no more of it

        return StreamingResponse(body(), media_type="text/plain; charset=utf-8")

    return Starlette(routes=[Route("/", handle)])


if __name__ == "__main__":
    import uvicorn

    with rl.Engine(model="smollm2") as engine:
        uvicorn.run(make_app(engine), host="127.0.0.1", port=8000)
