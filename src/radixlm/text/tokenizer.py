"""This module owns the way from text to token ids and back: `tokenizers`, plus what a server needs around it."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from radixlm.base.errors import BadRequest, ContextLengthExceeded, StartupError
from radixlm.checkpoint.checkpoint import Checkpoint
from radixlm.text.words import alternation

#: Longer texts are encoded through the batch call, which lets other threads run meanwhile.
_INLINE_CHARACTERS = 2048

#: A text with more characters per allowed token than this is counted in slices before it is encoded. Prose has four.
_DENSE = 8
_SLICE = 1 << 16
#: A cut between slices makes a few tokens more or less. So many are forgiven, and a refusal is never a mistake.
_SLICE_ERROR = 64

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of text.

    Attributes:
        trusted: control words in it are control tokens (a template wrote them), not text that a user typed.
    """

    text: str
    trusted: bool = True


class Tokenizer:
    """One vocabulary. Safe to use from several threads.

    Attributes:
        backend: the library's tokenizer. Its settings stay as they are.
        vocab_size: first id that is no token. The model's output may be wider (padding).
        control_words: the tokens marked special, as text.
        special_ids: their ids.
        eos_ids: the ids that end a text: what generation_config, config and tokenizer name, without repetition.
        bos_id: the start token, whether or not encoding adds it.
    """

    def __init__(
        self,
        file: Path,
        tokenizer_config: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        generation_config: Mapping[str, Any] | None = None,
    ) -> None:
        """Load `tokenizer.json`. Raises `StartupError` if it cannot be."""
        self.backend = _load(file)
        added: dict[int, AddedToken] = self.backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.control_words = tuple(token.content for token in added.values() if token.special)
        self.vocab_size: int = max([self.backend.get_vocab_size(), *(index + 1 for index in added)])
        names, model, generation = tokenizer_config or {}, config or {}, generation_config or {}
        ends = [*_ids(generation.get("eos_token_id")), *_ids(model.get("eos_token_id"))]
        ends += [index for index in [self._named(names.get("eos_token"))] if index is not None]
        self.eos_ids = tuple(dict.fromkeys(ends))
        starts = [
            self._named(names.get("bos_token")),
            *_ids(generation.get("bos_token_id")),
            *_ids(model.get("bos_token_id")),
        ]
        self.bos_id = next((index for index in starts if index is not None), None)
        self._literal = _Literal(self.backend, added)
        self._spelling = _spelling(self.backend)

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Tokenizer:
        """The checkpoint's tokenizer. Raises `StartupError` if it has none that can be used."""
        if checkpoint.tokenizer_file is None:
            raise StartupError(
                f"{checkpoint.directory} holds no tokenizer.json; --tokenizer-path names a directory that does "
                "(transformers writes one: AutoTokenizer.from_pretrained(...).save_pretrained(...))"
            )
        return cls(
            checkpoint.tokenizer_file, checkpoint.tokenizer_config, checkpoint.config, checkpoint.generation_config
        )

    # ---- tokens

    def id(self, token: str) -> int | None:
        index: int | None = self.backend.token_to_id(token)
        return index

    def token(self, index: int) -> str | None:
        """The token as the vocabulary spells it (`Ġword`, `▁word`), None for an id that is no token."""
        if not 0 <= index < self.vocab_size:
            return None
        token: str | None = self.backend.id_to_token(index)
        return token

    def token_bytes(self, index: int) -> bytes:
        """Exactly the bytes that the token adds to a text; none for an id that is no token."""
        token = self.token(index)
        return b"" if token is None else self._spelling.bytes_of(token)

    def check(self, ids: Iterable[int], param: str = "tokens") -> None:
        """Raises `BadRequest` for the first id that is no token."""
        for index in ids:
            if self.token(index) is None:
                raise BadRequest(
                    f"{param} holds {index}, which is no token: ids run from 0 to {self.vocab_size - 1}", param=param
                )

    # ---- text to ids

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """The ids of a text.

        Args:
            add_special_tokens: surround it as the model was trained to see it (a start token, where it has one).
            parse_special: a control word in the text becomes its token; else it is spelled with ordinary tokens.

        Raises:
            BadRequest: the text is not valid Unicode (half of a surrogate pair).
        """
        if parse_special:
            return _encode(self.backend, text, add_special_tokens)
        return self._literal.encode([Piece(text, trusted=False)], add_special_tokens)

    def encode_limited(
        self, text: str, limit: int, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        """`encode` for a text that may have `limit` tokens. One that is far longer costs little to refuse.

        Raises:
            ContextLengthExceeded: it has more. The message says how many, or at least how many.
            BadRequest: as `encode`.
        """
        self._refuse_long([text], limit)
        return _within(self.encode(text, add_special_tokens=add_special_tokens, parse_special=parse_special), limit)

    def encode_pieces(self, pieces: Sequence[Piece], limit: int | None = None) -> list[int]:
        """The ids of a rendered chat: nothing is added around it, and control words count in trusted pieces only.

        The pieces are one text: tokens may cross their borders. Raises as `encode_limited` does.
        """
        if limit is not None:
            self._refuse_long([piece.text for piece in pieces], limit)
        if all(piece.trusted for piece in pieces):
            ids = self.encode("".join(piece.text for piece in pieces), add_special_tokens=False)
        else:
            ids = self._literal.encode(pieces)
        return ids if limit is None else _within(ids, limit)

    def _refuse_long(self, texts: Sequence[str], limit: int) -> None:
        total = sum(map(len, texts))
        if total <= _DENSE * limit:
            return
        found = slices = 0
        for text in texts:
            for start in range(0, len(text), _SLICE):
                found += len(_encode(self.backend, text[start : start + _SLICE], False))
                slices += 1
                if found - slices * _SLICE_ERROR > limit:
                    raise _too_long(
                        f"{total} characters, which are more than {found - slices * _SLICE_ERROR} tokens", limit
                    )

    # ---- ids to text

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids. Ids that are no token have none; bytes that are no character read U+FFFD."""
        text: str = self.backend.decode([index for index in ids if index >= 0], skip_special_tokens=skip_special_tokens)
        return text

    def _named(self, token: Any) -> int | None:
        return self.id(token) if isinstance(token, str) else None


class _Literal:
    """The vocabulary with deaf ears for control words: they are spelled like any text.

    So that a template's own control words still work, each has an alias that nobody can guess, made at start. A text is
    then encoded once, whole, with aliases where the template wrote control words; the library itself does the cutting
    around them.
    """

    def __init__(self, backend: Backend, added: Mapping[int, AddedToken]) -> None:
        self.backend = Backend(backend.model)  # shared, not copied
        for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
            if getattr(backend, part) is not None:
                setattr(self.backend, part, getattr(backend, part))
        self.backend.encode_special_tokens = True
        nonce = secrets.token_hex(16)
        self._alias = {token.content: f"<{nonce}-{index}>" for index, token in added.items() if token.special}
        aliases = [
            AddedToken(
                self._alias[token.content], lstrip=token.lstrip, rstrip=token.rstrip, normalized=False, special=False
            )
            for token in added.values()
            if token.special
        ]
        self.backend.add_tokens([*added.values(), *aliases])
        self._words = alternation(self._alias)
        ids = {self.backend.token_to_id(token.content): index for index, token in added.items()}
        ids |= {self.backend.token_to_id(self._alias[token.content]): i for i, token in added.items() if token.special}
        self._ids = ids

    def encode(self, pieces: Iterable[Piece], add_special_tokens: bool = False) -> list[int]:
        """The ids of the pieces as one text."""
        marked = [
            self._words.sub(lambda match: self._alias[match[0]], piece.text) if piece.trusted else piece.text
            for piece in pieces
        ]
        own = self._ids
        return [own.get(index, index) for index in _encode(self.backend, "".join(marked), add_special_tokens)]


class _ByteLevel:
    """Every character of a token stands for a byte (GPT-2's alphabet)."""

    def __init__(self) -> None:
        visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        hidden = [byte for byte in range(256) if byte not in visible]
        self._byte = {chr(byte): byte for byte in visible} | {chr(256 + n): byte for n, byte in enumerate(hidden)}

    def bytes_of(self, token: str) -> bytes:
        try:
            return bytes([self._byte[char] for char in token])
        except KeyError:  # not of the alphabet, so not merged from bytes: it stands for itself
            return token.encode()


class _Marked:
    """Tokens are text with a mark for the space, or single bytes (SentencePiece's scheme)."""

    def __init__(self, replaced: Sequence[tuple[str, str]], fallback: bool) -> None:
        self._replaced = replaced
        self._fallback = fallback

    def bytes_of(self, token: str) -> bytes:
        byte = _BYTE_TOKEN.fullmatch(token) if self._fallback else None
        if byte:
            return bytes.fromhex(byte[1])
        for old, new in self._replaced:
            token = token.replace(old, new)
        return token.encode()


def _spelling(backend: Backend) -> _ByteLevel | _Marked:
    """How tokens spell bytes, from the decoder's steps."""
    steps = [json.loads(backend.decoder.__getstate__())] if backend.decoder is not None else []
    if steps and steps[0]["type"] == "Sequence":
        steps = steps[0]["decoders"]
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return _ByteLevel()
    replaced = [(step["replacement"], " ") for step in steps if step["type"] == "Metaspace"]
    replaced += [
        (step["pattern"]["String"], step["content"])
        for step in steps
        if step["type"] == "Replace" and "String" in step["pattern"]
    ]
    return _Marked(replaced, "ByteFallback" in kinds)


def _load(file: Path) -> Backend:
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the library raises no narrower class
        raise StartupError(f"cannot load the tokenizer {file}: {error}") from None
    backend.no_truncation()
    backend.no_padding()
    return backend


def _encode(backend: Backend, text: str, add_special_tokens: bool) -> list[int]:
    try:
        if len(text) <= _INLINE_CHARACTERS:
            ids: list[int] = backend.encode(text, add_special_tokens=add_special_tokens).ids
        else:
            ids = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    except TypeError:
        raise BadRequest("the text is not valid Unicode: it holds half of a surrogate pair") from None
    return ids


def _within(ids: list[int], limit: int) -> list[int]:
    if len(ids) > limit:
        raise _too_long(f"{len(ids)} tokens", limit)
    return ids


def _too_long(size: str, limit: int) -> ContextLengthExceeded:
    return ContextLengthExceeded(f"the prompt has {size}; the context length is {limit} tokens. Shorten the prompt")


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [index for index in values if type(index) is int and index >= 0]
