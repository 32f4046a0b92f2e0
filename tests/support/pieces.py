"""Answers in pieces, as parsers would make them: to see what dialects make of them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from radixlm.api.protocols.chat import Answers, CallIds, Chat, Reasoning
from radixlm.api.protocols.prompts import Prompt
from radixlm.api.service import Service
from radixlm.base.pieces import Piece, joined
from radixlm.base.request import Request
from radixlm.base.sampling import SamplingParams
from radixlm.wire.messages import Finish, Stats, TextDelta
from support.server import Api

PROMPT = (1, 2, 3, 4, 5)


def service_of(api: Api) -> Service:
    return Service(api.hub, api.served, api.config)


def chat(api: Api, max_tokens: int = 50) -> Chat:
    """A chat whose one sequence is read by parsers."""
    request = Request(uid=1, rid="r", tokens=PROMPT, sampling=SamplingParams(max_new_tokens=max_tokens), arrival=1000.0)
    return Chat(
        (request,), Prompt(PROMPT), Answers(len(PROMPT), 1, Reasoning(), True, CallIds("plain", ()), service_of(api))
    )


#: Whole answers: text, reasoning and calls in any order, with arguments that are JSON objects.
_said = st.tuples(st.sampled_from(["text", "reasoning"]), st.text(min_size=1, max_size=6))
_called = st.tuples(
    st.just("call"),
    st.tuples(st.sampled_from(["look", "add"]), st.sampled_from(["{}", '{"a": 1}', '{"b": [1, "\\u00e9"]}'])),
)
answers = st.lists(st.one_of(_said, _called), max_size=6)


def pieces_of(answer: list[Any]) -> list[Piece]:
    """The answer in as few pieces as can be."""
    pieces: list[Piece] = []
    calls = 0
    for kind, what in answer:
        if kind == "call":
            pieces += [Piece("call", what[0], calls), Piece("arguments", what[1], calls)]
            calls += 1
        else:
            pieces.append(Piece(kind, what))
    return joined(pieces)


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[Piece], list[TextDelta]]:
    """An answer, and deltas that tell it in parts cut anywhere; the last one has the end."""
    pieces = pieces_of(draw(answers))
    parts: list[Piece] = []
    for piece in pieces:
        text = piece.text
        while piece.kind != "call" and len(text) > 1 and draw(st.booleans()):
            cut = draw(st.integers(1, len(text) - 1))
            parts.append(Piece(piece.kind, text[:cut], piece.call))
            text = text[cut:]
        parts.append(Piece(piece.kind, text, piece.call))
    deltas = []
    while parts:
        count = draw(st.integers(1, len(parts)))
        deltas.append(TextDelta(1, ids=[1], completion_tokens=1, pieces=parts[:count]))
        parts = parts[count:]
    return pieces, [*deltas, ending()]


def ending(kind: str = "stop", matched: int | str | None = None, pieces: list[Piece] | None = None) -> TextDelta:
    stats = Stats(len(PROMPT), 7, 2, 0, 1000.0, 1001.0, 1002.0, 1004.0)
    return TextDelta(1, completion_tokens=7, finish=Finish(kind, matched), stats=stats, pieces=pieces or [])
