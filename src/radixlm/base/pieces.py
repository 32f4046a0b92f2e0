"""This module owns `Piece`: a part of a generated text that a parser gave a meaning. It is what dialects format."""

from __future__ import annotations

from typing import Literal

import msgspec

Kind = Literal["text", "reasoning", "call", "arguments"]


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """What came next in a text. Pieces of one kind that follow each other may be joined.

    Attributes:
        kind: text | reasoning | call (a tool call begins: `text` is the function's name) | arguments (more of the JSON
            text of that call's arguments).
        call: number of the tool call within its text, from 0, for call and arguments.
    """

    kind: Kind
    text: str
    call: int = 0
