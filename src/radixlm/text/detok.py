"""This module owns incremental detokenizing: ids of one sequence go in, text that can no longer change comes out.

Whatever the split of the ids over `push` calls, the pushed texts and `finish` join to exactly what the `tokenizers`
library makes of the whole list. That includes broken text: bytes that are no character, or a character cut off by the
end, become U+FFFD. Held back are only ids whose text still depends on what follows:

    byte-level vocabularies    the bytes of an unfinished character
    byte-fallback vocabularies a run of byte tokens, to its end: one bad byte turns every byte of its run into U+FFFD
    other decoders             text that ends in U+FFFD

The library's own `DecodeStream` does not hold this promise: a byte token that voids its run raises an error.
"""

from __future__ import annotations

import json
import re
from codecs import utf_8_decode
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tokenizers import Tokenizer as Backend

REPLACEMENT = "\ufffd"

#: `tail` looks at no longer run of byte tokens than this (bytes), so that it costs the same for every token.
TAIL_BYTES = 64

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class Vocabulary(Protocol):
    """What is needed of `text.tokenizer.Tokenizer`."""

    @property
    def backend(self) -> Backend: ...

    @property
    def special_ids(self) -> frozenset[int]: ...


class Detok(Protocol):
    """The text of one sequence as its ids arrive. Ids past the vocabulary are no text."""

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids settle."""
        ...

    def tail(self) -> str:
        """Whole characters that are held back, as they will read if the text ends here."""
        ...

    def finish(self) -> str:
        """The text of what is still held back, once no id follows."""
        ...


class Decoding:
    """The decoding rule of one tokenizer and its tables, shared by all sequences. Tables fill as ids are seen."""

    def __init__(self, tokenizer: Vocabulary) -> None:
        self._backend = tokenizer.backend
        self._special = tokenizer.special_ids
        self._steps = _steps(self._backend)
        self._open: dict[frozenset[int], Callable[[], Detok]] = {}

    def open(self, skip_special_tokens: bool = True, shown: Sequence[str] = ()) -> Detok:
        """The detokenizer of a new sequence.

        Args:
            shown: special tokens that are not skipped, as text: the markers that a parser looks for.
        """
        hidden = self._special if skip_special_tokens else frozenset[int]()
        if hidden and shown:
            hidden -= {self._backend.token_to_id(word) for word in shown}
        if hidden not in self._open:
            self._open[hidden] = self._opener(hidden)
        return self._open[hidden]()

    def _opener(self, hidden: frozenset[int]) -> Callable[[], Detok]:
        if [step["type"] for step in self._steps] == ["ByteLevel"]:
            return _opener(ByteLevelDetok, _BytePieces(self._backend, hidden))
        rule = _piece_rule(self._steps)
        if rule is not None:
            return _opener(PieceDetok, _TextPieces(self._backend, hidden, rule))
        return _opener(WindowDetok, _decode_all(self._backend, hidden))


class ByteLevelDetok:
    """Every token is bytes; the text is their concatenation read as UTF-8 (GPT-2's scheme)."""

    __slots__ = ("_held", "_pieces")

    def __init__(self, pieces: _BytePieces) -> None:
        self._pieces = pieces
        self._held = b""

    def push(self, ids: Iterable[int]) -> str:
        pieces = self._pieces
        data = self._held + b"".join([pieces[token] for token in ids])
        text, used = utf_8_decode(data, "replace", False)
        self._held = data[used:]
        return text

    def tail(self) -> str:
        return ""

    def finish(self) -> str:
        text, _ = utf_8_decode(self._held, "replace", True)
        self._held = b""
        return text


class PieceDetok:
    """Every token is text, or one byte of a run (sentencepiece's scheme as `tokenizers` decodes it)."""

    __slots__ = ("_pieces", "_run", "_started", "_strip")

    def __init__(self, pieces: _TextPieces) -> None:
        self._pieces = pieces
        self._run = bytearray()
        self._strip = pieces.rule.strip
        self._started = not pieces.rule.drop_first

    def push(self, ids: Iterable[int]) -> str:
        parts = []
        for token in ids:
            piece = self._pieces[token]
            if piece is None:
                continue
            if not self._started:
                self._started = True
                piece = self._pieces.first(token)
            if isinstance(piece, str):
                if self._run:
                    parts.append(self._end_run())
                parts.append(piece)
            else:
                self._run += piece
        return self._lead("".join(parts))

    def tail(self) -> str:
        if not 0 < len(self._run) <= TAIL_BYTES:
            return ""
        try:
            text = self._run.decode()
        except UnicodeDecodeError:
            return ""
        return text[_leading_spaces(text, self._strip) :]

    def finish(self) -> str:
        return self._lead(self._end_run())

    def _end_run(self) -> str:
        try:
            text = self._run.decode()
        except UnicodeDecodeError:
            text = REPLACEMENT * len(self._run)
        self._run.clear()
        return text

    def _lead(self, text: str) -> str:
        """Take the spaces that the rule strips from the beginning of the whole text."""
        if not self._strip or not text:
            return text
        spaces = _leading_spaces(text, self._strip)
        self._strip = self._strip - spaces if spaces == len(text) else 0
        return text[spaces:]


class WindowDetok:
    """Any other decoder: the text of the last few tokens, less the text of those already shown.

    Exact where a token's text depends on its neighbours and on being the first or the last (WordPiece, BPE suffixes).
    """

    __slots__ = ("_decode", "_ids", "_shown", "_shown_ids")

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []  # the window: `_shown_ids` ids whose text is `_shown`, then those held back
        self._shown_ids = 0
        self._shown = ""

    def push(self, ids: Iterable[int]) -> str:
        self._ids.extend(ids)
        text = self._decode(self._ids)
        if text.endswith(REPLACEMENT) or not text.startswith(self._shown):
            return ""
        new = text[len(self._shown) :]
        context = self._ids[self._shown_ids :]
        shown = self._decode(context)
        if shown:  # else nothing to lean on: a hidden token does not make the next one the first
            self._ids, self._shown = context, shown
        else:
            self._shown = text
        self._shown_ids = len(self._ids)
        return new

    def tail(self) -> str:
        return ""

    def finish(self) -> str:
        return self._decode(self._ids)[len(self._shown) :]


@dataclass(frozen=True, slots=True)
class _PieceRule:
    """How tokens become text.

    Attributes:
        replace: (old, new) in every token.
        bytes: `<0xNN>` tokens stand for a byte.
        strip: most spaces taken off the start of the whole text.
        drop_first: a character dropped from the first token instead of replaced.
    """

    replace: tuple[tuple[str, str], ...]
    bytes: bool = False
    strip: int = 0
    drop_first: str = ""


class _BytePieces(dict[int, bytes]):
    """Token id -> its bytes; none for hidden ids and ids past the vocabulary."""

    def __init__(self, backend: Backend, hidden: frozenset[int]) -> None:
        super().__init__()
        self._backend = backend
        self._hidden = hidden
        self._bytes = _byte_alphabet()

    def __missing__(self, token: int) -> bytes:
        text = self._backend.id_to_token(token)
        if text is None or token in self._hidden:
            piece = b""
        else:
            try:
                piece = bytes([self._bytes[char] for char in text])
            except KeyError:  # an added token that is not spelled in the byte alphabet stands for itself
                piece = text.encode()
        self[token] = piece
        return piece


class _TextPieces(dict[int, str | bytes | None]):
    """Token id -> its text, its byte, or None for ids that the decoder never sees (hidden, or past the vocabulary)."""

    def __init__(self, backend: Backend, hidden: frozenset[int], rule: _PieceRule) -> None:
        super().__init__()
        self._backend = backend
        self._hidden = hidden
        self.rule = rule

    def __missing__(self, token: int) -> str | bytes | None:
        text: str | None = self._backend.id_to_token(token)
        piece: str | bytes | None = None
        if text is not None and token not in self._hidden:
            for old, new in self.rule.replace:
                text = text.replace(old, new)
            byte = _BYTE_TOKEN.fullmatch(text) if self.rule.bytes else None
            piece = bytes.fromhex(byte[1]) if byte else text
        self[token] = piece
        return piece

    def first(self, token: int) -> str:
        """The text of a token that opens the sequence, under `drop_first`."""
        text: str | None = self._backend.id_to_token(token)
        return text.replace(self.rule.drop_first, "") if text is not None else ""


def _opener(kind: Callable[[Any], Detok], shared: object) -> Callable[[], Detok]:
    return lambda: kind(shared)


def _decode_all(backend: Backend, hidden: frozenset[int]) -> Callable[[Sequence[int]], str]:
    def decode(ids: Sequence[int]) -> str:
        text: str = backend.decode([token for token in ids if token not in hidden], skip_special_tokens=False)
        return text

    return decode


def _steps(backend: Backend) -> list[dict[str, Any]]:
    """The decoder as a flat list of its steps. A `Fuse` at the end changes nothing and is left out."""
    if backend.decoder is None:
        return []
    waiting = [json.loads(backend.decoder.__getstate__())]
    steps: list[dict[str, Any]] = []
    while waiting:
        step = waiting.pop(0)
        if step["type"] == "Sequence":
            waiting = step["decoders"] + waiting
        else:
            steps.append(step)
    while steps and steps[-1]["type"] == "Fuse":
        steps.pop()
    return steps


def _piece_rule(steps: list[dict[str, Any]]) -> _PieceRule | None:
    """The rule for `Replace* ByteFallback? (Fuse Strip)?` or `Metaspace`; None for a decoder of another shape."""
    rest = list(steps)
    if [step["type"] for step in rest] == ["Metaspace"]:
        mark = rest[0]["replacement"]
        return _PieceRule(((mark, " "),), drop_first="" if rest[0]["prepend_scheme"] == "never" else mark)
    replace = []
    while rest and rest[0]["type"] == "Replace" and "String" in rest[0]["pattern"]:
        step = rest.pop(0)
        replace.append((step["pattern"]["String"], step["content"]))
    with_bytes = bool(rest) and rest[0]["type"] == "ByteFallback"
    if with_bytes:
        rest.pop(0)
    strip = 0
    if [step["type"] for step in rest] == ["Fuse", "Strip"] and rest[1]["content"] == " " and rest[1]["stop"] == 0:
        strip = rest[1]["start"]
        rest.clear()
    if rest or not (replace or with_bytes):
        return None
    return _PieceRule(tuple(replace), with_bytes, strip)


def _leading_spaces(text: str, most: int) -> int:
    return min(most, len(text) - len(text.lstrip(" ")))


def _byte_alphabet() -> dict[str, int]:
    """Character -> the byte it spells (GPT-2's table): itself where that is visible, else one from 256 on."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in visible}
    for byte in range(256):
        if byte not in visible:
            alphabet[chr(256 + len(alphabet) - len(visible))] = byte
    return alphabet
