"""This module owns `/parse_function_call` and `/separate_reasoning`: the parsers of chats for texts made elsewhere."""

from __future__ import annotations

from typing import Any

import msgspec

from radixlm.api.limits import Json
from radixlm.api.protocols.chat_formats import functions_of, texts_of
from radixlm.api.protocols.chat_prompt import ChatPrompt, check_tools
from radixlm.api.protocols.fields import Reader
from radixlm.api.service import Service
from radixlm.base.errors import BadRequest, StartupError
from radixlm.base.pieces import Piece
from radixlm.base.request import Parsing
from radixlm.text.parsers.choose import reasoning_named, tools_named
from radixlm.text.parsers.engine import parse
from radixlm.text.parsers.formats import TOOLS


class CallFields(msgspec.Struct, kw_only=True, frozen=True):
    text: str | None = None
    tools: list[Any] | None = None
    tool_call_parser: str | None = None


class ReasoningFields(msgspec.Struct, kw_only=True, frozen=True):
    text: str | None = None
    reasoning_parser: str | None = None
    thinking: bool | None = None


CALLS = Reader(CallFields)
REASONING = Reader(ReasoningFields)


async def parse_function_call(body: Json, service: Service) -> Json:
    """`text` (and the `tools` that may be called; all if there are none) to what is said and what is called.

    `tool_call_parser` names a format; without it, that of the model.
    """
    fields = CALLS.read(body)
    text = _text(fields.text)
    prompt = ChatPrompt(messages=(), tools=fields.tools or ())
    check_tools(prompt)
    functions = functions_of(prompt)
    name = service.served.formats.tools
    if fields.tool_call_parser is not None:
        name = _known(tools_named, fields.tool_call_parser, "tool_call_parser")
    parsing = Parsing(
        tools=name,
        names=tuple(dict.fromkeys(function.name for function in functions)),
        texts=texts_of(functions) if name and not TOOLS[name].quotes else (),
    )
    pieces = await _pieces(text, parsing, service)
    calls: list[Json] = []
    for piece in pieces:
        if piece.kind == "call":
            calls.append({"tool_index": piece.call, "name": piece.text, "parameters": ""})
        elif piece.kind == "arguments":
            calls[-1]["parameters"] += piece.text
    return {"normal_text": _joined(pieces, "text"), "calls": calls}


async def separate_reasoning(body: Json, service: Service) -> Json:
    """`text` to reasoning and answer.

    `reasoning_parser` names a format; without it, that of the model. `thinking`: the text begins within the reasoning.
    """
    fields = REASONING.read(body)
    text = _text(fields.text)
    name = service.served.formats.reasoning
    if fields.reasoning_parser is not None:
        name = _known(reasoning_named, fields.reasoning_parser, "reasoning_parser")
    parsing = Parsing(reasoning=name, thinking=bool(fields.thinking))
    pieces = await _pieces(text, parsing, service)
    return {"reasoning_text": _joined(pieces, "reasoning"), "text": _joined(pieces, "text")}


async def _pieces(text: str, parsing: Parsing, service: Service) -> list[Piece]:
    return await service.workers.run(len(text), lambda: parse(text, parsing))


def _joined(pieces: list[Piece], kind: str) -> str:
    return "".join(piece.text for piece in pieces if piece.kind == kind)


def _text(text: str | None) -> str:
    if text is None:
        raise BadRequest("text is missing", param="text")
    return text


def _known(named: Any, name: str, param: str) -> str:
    try:
        found: str = named(name, param)
    except StartupError as error:
        raise BadRequest(error.message, param=param) from None
    return found
