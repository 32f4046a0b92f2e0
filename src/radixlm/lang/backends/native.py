"""This module owns the backends that speak `/generate`: the engine in this process and a server, alike but for how a
body gets there and back (`Transport`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from radixlm.base.errors import BadRequest, Internal
from radixlm.lang.backends.base import Answer, Backend, Scheduling, Scored
from radixlm.lang.params import AROUND, Params
from radixlm.lang.prompt import Prompt

Json = dict[str, Any]


class Transport(Protocol):
    """The way to a model of ours."""

    name: str

    async def ask(self, body: Json) -> Any:
        """The answer of `/generate`: an object, or a list of them for a batch and for `n` above 1."""
        ...

    def events(self, body: Json) -> AsyncIterator[Json]:
        """The answers of a streamed `/generate`."""
        ...

    async def render(self, messages: list[Json], *, generate: bool, resume: bool) -> list[int]:
        """The ids of a chat. `generate`: up to the model's turn. `resume`: up to the end of the last message's text."""
        ...

    async def encode(self, text: str) -> list[int]:
        """The ids of a text as a prompt."""
        ...

    async def decode(self, ids: list[int]) -> str:
        """The text of ids, control words included."""
        ...

    async def flush(self) -> None: ...

    async def info(self) -> Json: ...

    async def close(self) -> None: ...


class Native(Backend):
    """A model of ours.

    Chats are rendered through the model's own template, so a program's text is what `/v1/chat/completions` renders of
    the same messages, and both share their prefixes.
    """

    can = frozenset(
        ("text", "chat", "select", "logprobs", "prompt_logprobs", "n", "continue", "regex", "json_schema", "ebnf")
    )

    def __init__(self, transport: Transport, scheduling: Scheduling | None = None) -> None:
        super().__init__(scheduling)
        self.transport = transport
        self.name = transport.name

    async def generate(self, prompt: Prompt, params: Params) -> list[Answer]:
        answer = await self.transport.ask({**await self._prompt(prompt), **_asked(params)})
        answers = [_answer(item) for item in (answer if isinstance(answer, list) else [answer])]
        _check(answers)
        return answers

    async def stream(self, prompt: Prompt, params: Params) -> AsyncIterator[Answer]:
        body = {**await self._prompt(prompt), **_asked(params), "stream": True}
        async with aclosing(self.transport.events(body)) as events:  # type: ignore[type-var]
            async for event in events:
                answer = _answer(event)
                _check([answer])
                yield answer

    async def prefill(self, prompt: Prompt) -> None:
        if prompt.text or prompt.chat:
            await self.transport.ask({**await self._prompt(prompt), "sampling_params": {"max_new_tokens": 0}})

    async def score(self, prompt: Prompt, choices: Sequence[str], *, alone: bool) -> list[Scored]:
        """One batch of prompt + choice, whose prompt is computed once."""
        before, rows = await self._rows(prompt, choices)
        start = min(_common(before, row) for row in rows)
        if start == 0:
            raise BadRequest("select needs something before it: the first token of a text has no probability")
        body = _scoring(rows, start) | self._space(prompt)
        given = [_logprobs(item) for item in await self.transport.ask(body)]
        bare: list[tuple[float, ...]] = [()] * len(rows)
        if alone:
            answers = await self.transport.ask(_scoring([row[start:] for row in rows], 0) | self._space(prompt))
            bare = [_logprobs(item) for item in answers]
        return [Scored(tuple(row[start:]), a, b) for row, a, b in zip(rows, given, bare, strict=True)]

    async def _rows(self, prompt: Prompt, choices: Sequence[str]) -> tuple[list[int], list[list[int]]]:
        """Ids of the prompt, and of the prompt with each choice."""
        if not prompt.chat:
            texts = [prompt.text, *(prompt.text + choice for choice in choices)]
            before, *rows = [await self.transport.encode(text) for text in texts]
            return before, rows
        before = await self._ids(prompt)
        messages, resumed = prompt.request()
        if prompt.open is None:
            raise BadRequest("select stands between the messages of a chat; put it into a role")
        if not resumed:
            messages = [*messages, {"role": prompt.open.role, "content": ""}]
        last = messages[-1]
        rows = []
        for choice in choices:
            chat = [*messages[:-1], {**last, "content": last["content"] + choice}]
            rows.append(await self.transport.render(chat, generate=False, resume=True))
        return before, rows

    async def text(self, prompt: Prompt) -> str:
        return await self.transport.decode(await self._ids(prompt)) if prompt.chat else prompt.text

    async def flush_cache(self) -> None:
        await self.transport.flush()

    async def server_info(self) -> Json:
        return await self.transport.info()

    async def close(self) -> None:
        await self.transport.close()

    async def _prompt(self, prompt: Prompt) -> Json:
        return ({"input_ids": await self._ids(prompt)} if prompt.chat else {"text": prompt.text}) | self._space(prompt)

    def _space(self, prompt: Prompt) -> Json:
        return {"cache_salt": f"program-{prompt.program}"} if self.scheduling.apart else {}

    async def _ids(self, prompt: Prompt) -> list[int]:
        messages, resumed = prompt.request()
        if not messages:
            messages, resumed = [{"role": "assistant", "content": ""}], True
        generate = prompt.open is not None and not resumed
        return await self.transport.render(messages, generate=generate, resume=resumed)


def _asked(params: Params) -> Json:
    """Parameters as the fields of a body."""
    said = params.said()
    around = {name: said.pop(name) for name in AROUND if name in said}
    return {"sampling_params": said, **around}


def _scoring(rows: Sequence[Sequence[int]], start: int) -> Json:
    return {
        "input_ids": [list(row) for row in rows],
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": start,
    }


def _logprobs(item: Json) -> tuple[float, ...]:
    """Of the scored tokens. The first of a text has none, which counts as 0."""
    _check([_answer(item)])
    scored = item["meta_info"]["input_token_logprobs"]
    return tuple(0.0 if entry[0] is None else float(entry[0]) for entry in scored)


def _answer(item: Any) -> Answer:
    try:
        return Answer(item["text"], {**item["meta_info"], "output_ids": item.get("output_ids", [])})
    except (TypeError, KeyError, AttributeError):
        raise Internal(f"not an answer of /generate: {str(item)[:80]!r}", code="bad_response") from None


def _check(answers: Sequence[Answer]) -> None:
    """One of several that failed is told in its `finish_reason`."""
    for answer in answers:
        finish = answer.meta.get("finish_reason")
        if isinstance(finish, dict) and finish.get("type") == "abort":
            raise Internal(f"a text was aborted: {finish.get('message')}", code=str(finish.get("err_type", "aborted")))


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    length = 0
    for one, other in zip(a, b, strict=False):
        if one != other:
            break
        length += 1
    return length
