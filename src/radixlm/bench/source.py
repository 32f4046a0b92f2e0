"""This module owns where prompts are cut from: real English text, its token ids, or random ids."""

from __future__ import annotations

import platform
import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from radixlm.base.errors import BadRequest, StartupError

#: Characters of English prose in a token of a common vocabulary; used when nobody can count tokens.
CHARACTERS_PER_TOKEN = 4.2
#: Text is tokenised in pieces, so that a server is never sent a huge body.
PIECE = 20_000
#: Ids below this are often control tokens; random prompts leave them out.
FIRST_RANDOM_ID = 256

Encode = Callable[[str], list[int]]


def topics_text() -> tuple[str, str]:
    """(text, name): about 0.7 MB of English prose with some code that ships with CPython."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[key] for key in sorted(topics))
    return text, f"pydoc_data.topics of CPython {platform.python_version()}"


@dataclass(frozen=True, slots=True)
class Source:
    """What prompts are cut from. One of `ids` and `vocab_size` is set if prompts can be given as token ids.

    Attributes:
        name: for the report.
        text: real text.
        ids: the ids of `text`.
        vocab_size: random ids are drawn below it.
        characters_per_token: of `text`, measured or guessed.
    """

    name: str
    text: str
    ids: array[int] | None = None
    vocab_size: int | None = None
    characters_per_token: float = CHARACTERS_PER_TOKEN

    @property
    def has_ids(self) -> bool:
        return self.ids is not None or self.vocab_size is not None


def tokenised(encode: Encode, tokenizer: str) -> Source:
    """Real text with the ids that `encode` gives it."""
    text, name = topics_text()
    ids = array("i")
    for piece in pieces(text):
        ids.extend(encode(piece))
    if len(ids) < 2:
        raise StartupError(f"{tokenizer} turns {name} into {len(ids)} tokens; it is no tokenizer for text")
    return Source(f"{name}, tokenised by {tokenizer}", text, ids=ids, characters_per_token=len(text) / len(ids))


def pieces(text: str) -> list[str]:
    return [text[at : at + PIECE] for at in range(0, len(text), PIECE)]


def random_ids(vocab_size: int) -> Source:
    """Random token ids below `vocab_size`."""
    if vocab_size <= FIRST_RANDOM_ID:
        raise BadRequest(f"a vocabulary of {vocab_size} is too small for random prompts", param="vocab_size")
    text, _ = topics_text()
    return Source(f"random token ids below {vocab_size}", text, vocab_size=vocab_size)


def plain_text() -> Source:
    """Real text whose tokens nobody counts: lengths are approximate, the server's usage says what they were."""
    text, name = topics_text()
    return Source(f"{name}, about {CHARACTERS_PER_TOKEN} characters a token", text)


def load_tokenizer(path: str) -> Encode:
    """The encoder of a `tokenizer.json`, or of the directory that holds one."""
    from tokenizers import Tokenizer

    file = Path(path)
    if file.is_dir():
        file = file / "tokenizer.json"
    if not file.is_file():
        raise StartupError(f"no tokenizer at {path}: give a tokenizer.json or a directory with one")
    tokenizer = Tokenizer.from_file(str(file))

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    return encode


class Cutter:
    """Cuts prompts out of a source. The cuts are a function of the seed and of what was asked for before.

    No two cuts start at the same place while there are places left, so that none is another's prefix.
    """

    def __init__(self, source: Source, rng: random.Random) -> None:
        self._source = source
        self._rng = rng
        self._starts: set[int] = set()

    def ids(self, count: int) -> list[int]:
        """`count` token ids."""
        source = self._source
        if source.ids is not None:
            start = self._start(len(source.ids), count, "tokens")
            return source.ids[start : start + count].tolist()
        if source.vocab_size is None:
            raise BadRequest("prompts as token ids need a tokenizer or a vocabulary size", param="tokenizer")
        return [self._rng.randrange(FIRST_RANDOM_ID, source.vocab_size) for _ in range(count)]

    def text(self, count: int) -> str:
        """Text of about `count` tokens: the first and last word may be cut."""
        source = self._source
        length = max(1, round(count * source.characters_per_token))
        start = self._start(len(source.text), length, "characters")
        return source.text[start : start + length]

    def _start(self, size: int, length: int, unit: str) -> int:
        places = size - length + 1
        if places < 1:
            raise BadRequest(f"a prompt of {length} {unit} is longer than the text it is cut from ({size})")
        start = self._rng.randrange(places)
        if len(self._starts) < places // 2:
            while start in self._starts:
                start = self._rng.randrange(places)
        self._starts.add(start)
        return start
