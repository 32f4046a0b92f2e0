"""This module owns the separation of a text into the model's reasoning and its answer, by the parsers of chats."""

from __future__ import annotations

from radixlm.base.errors import StartupError
from radixlm.base.request import Parsing
from radixlm.lang.errors import ProgramError
from radixlm.text.parsers.choose import reasoning_named
from radixlm.text.parsers.engine import markers, parse

#: The form that most models write.
AUTO = "think"


def form(model_type: str) -> str:
    """The format of reasoning that goes by a name. Raises `ProgramError` if there is none."""
    try:
        return reasoning_named(AUTO if model_type == "auto" else model_type, "model_type")
    except StartupError as error:
        raise ProgramError(error.message) from None


def split(text: str, model_type: str) -> tuple[str, str]:
    """(reasoning, answer). The mark at the beginning may be missing: some templates write it."""
    parsing = Parsing(reasoning=form(model_type))
    words = markers(parsing)
    if len(words) == 2 and words[0] not in text and words[1] in text:
        parsing = Parsing(reasoning=parsing.reasoning, thinking=True)
    pieces = parse(text, parsing)
    thought, answer = ("".join(piece.text for piece in pieces if piece.kind == kind) for kind in ("reasoning", "text"))
    return thought.strip(), answer.lstrip() if thought else answer
