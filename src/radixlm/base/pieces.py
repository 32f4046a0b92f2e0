"""This module owns `Piece`: a part of a generated text that a parser gave a meaning. It is what dialects format."""

from __future__ import annotations

from collections.abc import Iterable
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


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """The same with texts joined that belong together: of one kind in a row, arguments of one call."""
    runs: list[tuple[Piece, list[str]]] = []
    for piece in pieces:
        if runs and piece.kind != "call" and (runs[-1][0].kind, runs[-1][0].call) == (piece.kind, piece.call):
            runs[-1][1].append(piece.text)
        else:
            runs.append((piece, [piece.text]))
    return [first if len(texts) == 1 else Piece(first.kind, "".join(texts), first.call) for first, texts in runs]
