"""This module owns the chat that every dialect means: a `ChatWish` becomes requests, what they say becomes `News`.

A dialect is an adapter around it: it reads its body into a `ChatWish`, calls `prepare`, and formats `News` (streams) or
`Turn`s (whole answers) in its own words. It never looks at texts or at the formats that models write calls in.
"""

from __future__ import annotations

import secrets
import string
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from radixlm.api import errors
from radixlm.api.hub import Stage
from radixlm.api.protocols.chat_formats import carried
from radixlm.api.protocols.chat_prompt import ChatPrompt, Reasoning, render, weight
from radixlm.api.protocols.prompts import Prompt
from radixlm.api.protocols.requests import Standing, requests_for
from radixlm.api.protocols.sampling import Wish
from radixlm.api.protocols.tally import Counts, Tally
from radixlm.api.service import INLINE_CHARACTERS, Service
from radixlm.base.errors import RadixError
from radixlm.base.pieces import Piece
from radixlm.base.request import Grammar, LogprobParams, Request
from radixlm.text.parsers.formats import TOOLS
from radixlm.wire.messages import TextDelta

__all__ = ["Answers", "Call", "Chat", "ChatPrompt", "ChatWish", "News", "Reasoning", "Turn", "prepare"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatWish:
    """What a client of any dialect asks of a chat.

    Attributes:
        prompt: messages, tools and what else the template sees; it says too which tools may or must be called.
        wish: sampling, stops, stream, number of choices (see `protocols.sampling.read_wish`).
        standing: priority and cache compartment.
        rid: the client's name for the request.
        grammar: what the answer must match, for dialects that say it in a way of their own; else that of `wish` counts.
        param: the dialect's field that holds the messages, for errors about a prompt that is too long.
    """

    prompt: ChatPrompt
    wish: Wish
    standing: Standing
    rid: str
    logprobs: LogprobParams | None = None
    grammar: Grammar | None = None
    param: str = "messages"


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat that is ready to be submitted.

    Attributes:
        requests: one for each choice.
        prompt: the tokens that the model sees.
        answers: turns deltas of the requests into pieces; owned by the one form that answers.
    """

    requests: tuple[Request, ...]
    prompt: Prompt
    answers: Answers


async def prepare(asked: ChatWish, service: Service) -> Chat:
    """The requests of a chat.

    Raises:
        BadRequest: the messages, the tools or the choice of a tool are wrong; the template refuses them; too long.
    """
    rendered = await render(asked.prompt, service)
    formats = service.served.formats
    grammar = asked.grammar or asked.wish.grammar
    carries = await service.workers.run(
        weight(asked.prompt.tools, INLINE_CHARACTERS),
        lambda: carried(asked.prompt, rendered, grammar, formats, service.tokenizer),
    )
    prompt = Prompt(carries.tokens)
    requests = [
        msgspec.structs.replace(
            request,
            text=msgspec.structs.replace(request.text, parsing=carries.parsing),
            grammar=carries.grammar,
            thinking=carries.thinking,
        )
        for request in requests_for(
            prompt, asked.wish, asked.logprobs, asked.standing, rid=asked.rid, param=asked.param, service=service
        )
    ]
    ids = CallIds(TOOLS[formats.tools].ids if formats.tools else "plain", asked.prompt.messages)
    answers = Answers(
        len(prompt.tokens), asked.wish.choices, asked.prompt.reasoning, carries.parsing is not None, ids, service
    )
    return Chat(tuple(requests), prompt, answers)


class CallIds:
    """Makes the ids of calls, in the form that the model's template insists on.

    Args:
        style: plain (`call_` and random), short (nine letters and digits, Mistral's), numbered (`functions.f:3`,
            Kimi's: the function and how many calls came before in the whole chat).
    """

    def __init__(self, style: str, messages: Sequence[Any]) -> None:
        self._style = style
        self._before = 0
        if style == "numbered":
            self._before = sum(len(m.get("tool_calls") or ()) for m in messages if isinstance(m, Mapping))

    def make(self, name: str, call: int) -> str:
        """The id of call number `call` of an answer, of the function `name`."""
        if self._style == "numbered":
            return f"functions.{name}:{self._before + call}"
        if self._style == "short":
            return "".join(secrets.choice(_LETTERS) for _ in range(9))
        return f"call_{uuid.uuid4().hex[:24]}"


_LETTERS = string.ascii_letters + string.digits


# ---- answers


@dataclass(frozen=True, slots=True)
class News:
    """What came next of one choice.

    Attributes:
        pieces: in order. A `call` piece comes before the `arguments` of its call.
        finish: stop | length | tool_calls, once the choice has ended, else None.
        matched: the stop string or the token id that ended it.
    """

    pieces: Sequence[Piece]
    finish: str | None = None
    matched: int | str | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call of a whole answer. `arguments` is JSON text: an object, or the beginning of one cut by a limit."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Turn:
    """The whole answer of one choice. `text` is "" where there is none; `reasoning` and `calls` likewise."""

    text: str
    finish: str
    matched: int | str | None = None
    reasoning: str = ""
    calls: Sequence[Call] = ()


@dataclass(slots=True)
class _Choice:
    """What is known of a choice: ids of its calls by number, and reasoning held back until it is complete."""

    calls: dict[int, str] = field(default_factory=dict)
    held: list[str] = field(default_factory=list)


class Answers:
    """Turns the deltas of one chat's choices into news. One object for one answer; every delta passes once.

    Args:
        prompt_tokens: length of the prompt.
        choices: how many sequences answer.
        reasoning: how the client wants reasoning.
        parsed: the texts are taken apart by parsers, so their pieces are the answer.
    """

    def __init__(
        self, prompt_tokens: int, choices: int, reasoning: Reasoning, parsed: bool, ids: CallIds, service: Service
    ) -> None:
        self._service = service
        self._reasoning = reasoning
        self._parsed = parsed
        self._ids = ids
        self._tally = Tally([prompt_tokens], choices)
        self._choices = [_Choice() for _ in range(choices)]

    @property
    def counts(self) -> Counts:
        """Tokens so far."""
        return self._tally.counts()

    def call_id(self, index: int, call: int) -> str:
        """The id of a call that was announced in choice `index`. The same each time it is asked for."""
        return self._choices[index].calls[call]

    def news(self, index: int, delta: TextDelta) -> News:
        """What a delta says. Raises the error of a sequence that failed or was aborted."""
        self._check(delta)
        self._tally.note(index, delta)
        choice = self._choices[index]
        pieces = self._pieces(choice, delta)
        for piece in pieces:
            if piece.kind == "call":
                choice.calls[piece.call] = self._ids.make(piece.text, piece.call)
        if delta.finish is None:
            return News(pieces)
        finish = delta.finish.kind
        if finish == "stop" and choice.calls:
            finish = "tool_calls"
        return News(pieces, finish, delta.finish.matched)

    def turn(self, index: int, delta: TextDelta) -> Turn:
        """The answer of a choice whose one delta holds everything. Raises as `news` does."""
        news = self.news(index, delta)
        texts: dict[str, list[str]] = {"text": [], "reasoning": []}
        names: dict[int, str] = {}
        arguments: dict[int, list[str]] = {}
        for piece in news.pieces:
            if piece.kind == "call":
                names[piece.call] = piece.text
                arguments[piece.call] = []
            elif piece.kind == "arguments":
                arguments[piece.call].append(piece.text)
            else:
                texts[piece.kind].append(piece.text)
        calls = [Call(self.call_id(index, call), name, "".join(arguments[call])) for call, name in names.items()]
        text, reasoning = "".join(texts["text"]), "".join(texts["reasoning"])
        return Turn(text, news.finish or "stop", news.matched, reasoning, calls)

    def _pieces(self, choice: _Choice, delta: TextDelta) -> list[Piece]:
        """The pieces of a delta; a text that no parser reads is one piece."""
        if not self._parsed:
            return [Piece("text", delta.text)] if delta.text else []
        if not self._reasoning.separate:
            return [Piece("text", piece.text) if piece.kind == "reasoning" else piece for piece in delta.pieces]
        if self._reasoning.stream:
            return delta.pieces
        return self._whole_reasoning(choice, delta)

    def _whole_reasoning(self, choice: _Choice, delta: TextDelta) -> list[Piece]:
        """Reasoning in one piece, once something else follows or nothing does."""
        pieces: list[Piece] = []
        for piece in delta.pieces:
            if piece.kind == "reasoning":
                choice.held.append(piece.text)
                continue
            self._release(choice, pieces)
            pieces.append(piece)
        if delta.finish is not None:
            self._release(choice, pieces)
        return pieces

    def _release(self, choice: _Choice, pieces: list[Piece]) -> None:
        if choice.held:
            pieces.append(Piece("reasoning", "".join(choice.held)))
            choice.held.clear()

    def _check(self, delta: TextDelta) -> None:
        error: RadixError | None = errors.of_delta(delta, draining=self._service.hub.stage is Stage.DRAINING)
        if error is not None:
            raise error
