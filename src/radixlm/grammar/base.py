"""This module owns the grammar port: what a backend makes of a grammar, and what a matcher of one sequence can do.

A backend compiles a grammar once; every sequence gets a matcher of its own, which costs little. Backends must be sound:
what they accept is enforced without exception, what they cannot enforce they refuse with a reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from radixlm.base.errors import BadRequest
from radixlm.base.request import Grammar

#: [ceil(vocabulary / 32)] int32: id i is allowed if bit i % 32 of word i // 32 is set.
Words = npt.NDArray[np.int32]


class GrammarError(BadRequest):
    """A grammar that cannot be enforced: malformed, not supported, or beyond a limit."""

    code = "invalid_grammar"


class SchemaError(GrammarError):
    code = "invalid_json_schema"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a backend must know of the tokens.

    Attributes:
        tokenizer: content of `tokenizer.json`.
        size: the first id that can never be chosen.
        eos_ids: the ids that end a text; they are allowed where the grammar is complete.
    """

    tokenizer: str
    size: int
    eos_ids: tuple[int, ...]

    @property
    def words(self) -> int:
        """Length of a mask."""
        return -(-self.size // 32)


class Matcher(Protocol):
    """Where one sequence stands in its grammar. Any method may raise `GrammarError` once the grammar proves to be too
    complex for its limits.
    """

    @property
    def done(self) -> bool:
        """Nothing can follow: the text is complete."""
        ...

    def accept(self, token: int) -> bool:
        """Take the next token. False if the grammar does not allow it: then the matcher is of no more use."""
        ...

    def fill_mask(self, words: Words) -> None:
        """Write the tokens that may come next."""
        ...

    def forced(self) -> list[int]:
        """The tokens that must come next, in the spelling that the tokenizer itself has for the text. Empty where
        there is a choice, in the text or in where a token ends.
        """
        ...

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens."""
        ...

    def fork(self) -> Matcher:
        """A matcher of its own in the same place."""
        ...


class Compiled(Protocol):
    """A grammar ready for use. May be shared by threads and sequences.

    Attributes:
        size: bytes it is counted for in a cache. An estimate.
    """

    size: int

    def matcher(self) -> Matcher:
        """A matcher at the beginning."""
        ...


class Backend(Protocol):
    def compile(self, grammar: Grammar) -> Compiled:
        """Raises `GrammarError`. Called from worker threads, several at once."""
        ...
