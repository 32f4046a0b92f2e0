"""Inputs of the conformance cases: ids of the default model's tokenizer, and prompts that make the repeater talk."""

from __future__ import annotations

import pydoc_data.topics
from functools import cache
from typing import Any

from tokenizers import Tokenizer

from support.models import packaged
from support.tiny import PERIOD

#: Of the tiny models: the first id out of range, the longest sequence, the end token.
VOCAB, CTX, EOS = 49152, 2048, 2

#: A text of characters that take several tokens each.
WIDE = "👨‍👩‍👧‍👦 čtyřlístek 漢字 🇨🇿 naïve"


@cache
def tokenizer() -> Tokenizer:
    """The default model's, which the tiny models share."""
    file = packaged().tokenizer_file
    assert file is not None
    return Tokenizer.from_file(str(file))


@cache
def _ordinary() -> tuple[int, ...]:
    text = "\n".join(pydoc_data.topics.topics[name] for name in ("assignment", "class", "string-methods"))
    return tuple(encode(text))


def ids(count: int, start: int = 0) -> list[int]:
    """Varied ordinary token ids, the same ones each time: those of a long plain text, from its token `start` on."""
    found = _ordinary()[start : start + count]
    assert len(found) == count, "the text is too short"
    return list(found)


def encode(text: str) -> list[int]:
    """Token ids of a text, nothing added."""
    return list(tokenizer().encode(text, add_special_tokens=False).ids)


def decode(tokens: list[int], skip_special_tokens: bool = True) -> str:
    return str(tokenizer().decode(tokens, skip_special_tokens=skip_special_tokens))


def saying(text: str) -> list[int]:
    """The prompt after which the repeater says `text`, then its end token."""
    tokens = [*encode(text), EOS]
    return tokens + ids(PERIOD - len(tokens))


def chat_saying(text: str) -> dict[str, Any]:
    """The fields of a chat that makes the repeater say `text`."""
    filler = PERIOD - len(encode(text)) - 1
    return {"messages": [{"role": "user", "content": text}], "chat_template_kwargs": {"filler": filler}}
