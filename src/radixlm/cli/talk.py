"""This module owns conversations: a model in this process or behind a URL, asked and timed in the same way."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from radixlm.llm import Engine

Message = dict[str, Any]
#: A conversation for the chat template, or a text that the model continues as it stands.
Prompt = Sequence[Message] | str

INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class Piece:
    """News of an answer. Counts are those so far; 0 where the server tells them only at the end.

    Attributes:
        reasoning: what the model thought before `text`; it is no part of the answer.
    """

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish: str = ""
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """A whole answer and what it took.

    Attributes:
        first: seconds to the first text.
        seconds: in all.
        finish: stop, length, abort or interrupted.
    """

    text: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    first: float
    seconds: float
    finish: str

    @property
    def rate(self) -> float:
        """Tokens a second after the first one; 0 if there was no more than that."""
        span = self.seconds - self.first
        return (self.completion_tokens - 1) / span if self.completion_tokens > 1 and span > 0 else 0.0

    @property
    def share(self) -> float:
        """Part of the prompt that came out of the cache, 0 to 1."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def __str__(self) -> str:
        parts = [f"first token {self.first:.2f} s", f"{self.completion_tokens} tokens"]
        if self.rate:
            parts.append(f"{self.rate:.1f} tok/s")
        if self.prompt_tokens:
            parts.append(f"prompt {self.prompt_tokens} tokens, {self.cached_tokens} cached ({self.share:.0%})")
        if self.finish == "length":
            parts.append("cut at the token limit (--max-tokens)")
        elif self.finish not in ("", "stop"):
            parts.append(self.finish)
        return " | ".join(parts)


class Talker(Protocol):
    """A model to talk to. Sampling parameters go under their native names (`max_new_tokens`, `top_k`)."""

    @property
    def name(self) -> str: ...

    def stream(self, prompt: Prompt, sampling: Mapping[str, Any]) -> Iterator[Piece]:
        """The answer as it comes. Closing the iterator ends the generation."""
        ...

    def close(self) -> None: ...


def ask(
    talker: Talker,
    prompt: Prompt,
    sampling: Mapping[str, Any],
    write: Callable[[str], None],
    think: Callable[[str], None] = lambda text: None,
) -> Turn:
    """Stream one answer into `write`, its reasoning into `think`, and time it.

    Ctrl-C ends the answer, not the program: `finish` tells.
    """
    started = time.perf_counter()
    first = 0.0
    said: list[str] = []
    last = Piece("")
    pieces = talker.stream(prompt, sampling)
    finish = ""
    thought = False
    try:
        for piece in pieces:
            if not first and (piece.text or piece.reasoning or piece.completion_tokens):
                first = time.perf_counter() - started
            if piece.reasoning:
                think(piece.reasoning)
                thought = True
            if piece.text:
                if thought and not said:
                    think("\n\n")
                said.append(piece.text)
                write(piece.text)
            last = piece
        finish = last.finish
    except KeyboardInterrupt:
        finish = INTERRUPTED
    finally:
        close = getattr(pieces, "close", None)
        if close is not None:
            close()
    seconds = time.perf_counter() - started
    return Turn(
        "".join(said),
        last.prompt_tokens,
        last.completion_tokens,
        last.cached_tokens,
        first or seconds,
        seconds,
        finish,
    )


class Local:
    """The engine of this process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def name(self) -> str:
        return self._engine.facts.model.name

    def stream(self, prompt: Prompt, sampling: Mapping[str, Any]) -> Iterator[Piece]:
        if isinstance(prompt, str):
            results = self._engine.generate(prompt, dict(sampling), stream=True)
        else:
            results = self._engine.chat(list(prompt), dict(sampling), stream=True)
        shown = 0
        for result in results:
            meta = result["meta_info"]
            reason = meta.get("finish_reason") or {}
            yield Piece(
                text=result["text"][shown:],
                prompt_tokens=meta.get("prompt_tokens", 0),
                completion_tokens=meta.get("completion_tokens", 0),
                cached_tokens=meta.get("cached_tokens", 0),
                finish=reason.get("type", ""),
            )
            shown = len(result["text"])

    def close(self) -> None:
        self._engine.shutdown()


class Remote:
    """An OpenAI-compatible server."""

    def __init__(self, url: str, api_key: str | None = None, model: str | None = None) -> None:
        """Reach the server and learn the name of its model, unless one is asked for.

        Raises:
            RadixError: nobody answers there, the key is wrong, or no model is listed.
        """
        import asyncio

        from radixlm.client.http import Client

        self._client = Client(url, api_key)
        self._runner = asyncio.Runner()
        try:
            self.name = model or self._runner.run(self._client.model())
        except BaseException:
            self._runner.close()
            raise

    def stream(self, prompt: Prompt, sampling: Mapping[str, Any]) -> Iterator[Piece]:
        fields = {"max_tokens" if name == "max_new_tokens" else name: value for name, value in sampling.items()}
        if isinstance(prompt, str):
            chunks = self._client.stream_completions(prompt, model=self.name, **fields)
        else:
            chunks = self._client.stream_chat(list(prompt), model=self.name, **fields)
        finish = ""
        try:
            while (chunk := self._runner.run(_next(chunks))) is not None:
                text = reasoning = ""
                for choice in chunk.get("choices") or ():
                    delta = choice.get("delta") or {}
                    text += choice.get("text") or delta.get("content") or ""
                    reasoning += delta.get("reasoning_content") or delta.get("reasoning") or ""
                    finish = choice.get("finish_reason") or finish
                usage = chunk.get("usage") or {}
                details = usage.get("prompt_tokens_details") or {}
                yield Piece(
                    text,
                    usage.get("prompt_tokens", 0),
                    usage.get("completion_tokens", 0),
                    details.get("cached_tokens") or 0,
                    finish,
                    reasoning,
                )
        finally:
            self._runner.run(_close(chunks))

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()


async def _next(chunks: AsyncIterator[dict[str, Any]]) -> dict[str, Any] | None:
    return await anext(chunks, None)


async def _close(chunks: AsyncIterator[dict[str, Any]]) -> None:
    close = getattr(chunks, "aclose", None)
    if close is not None:
        await close()
