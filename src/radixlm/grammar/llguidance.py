"""This module owns the default grammar backend: llguidance, an Earley parser over a lexer of derivatives.

JSON is written in one form: `", "` and `": "` between tokens, no other white space, keys in the order of the schema. So
no white space can run for ever, and most of an object's frame is forced.

Where the text is forced, `LLMatcher.compute_ff_tokens` gives the tokens that the tokenizer itself would make of it,
as far as no continuation could change them (the library's docs call this token healing: the last tokens are held back
if they could merge with what follows).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

import llguidance
import msgspec
import numpy as np
from llguidance.gbnf_to_lark import any_to_lark

from radixlm.base.errors import RadixError
from radixlm.base.request import Grammar
from radixlm.grammar import check, tags_lark
from radixlm.grammar.base import GrammarError, SchemaError, Vocabulary, Words
from radixlm.grammar.expression import quoted, translated

P = ParamSpec("P")
R = TypeVar("R")

#: Limits of one matcher. A mask that needs more fuel than this ends its request, after some 10 ms.
LIMITS = llguidance.LLParserLimits(max_lexer_states=50_000, verbose_errors=False)

#: How the JSON of schemas is written. Set after what a schema says of itself.
JSON_FORM = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "lenient": False,
    "coerce_one_of": False,
}

#: Bytes that a compiled grammar is counted for, beside its text times `TEXT_WEIGHT`: measured for small schemas.
LEAST_SIZE, TEXT_WEIGHT = 100_000, 64

#: Longest part of the library's reasons that a client is shown.
LONGEST_REASON = 400


class LLGuidance:
    name = "llguidance"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokenizer = _tokenizer(vocabulary)

    def compile(self, grammar: Grammar) -> LLCompiled:
        source = self._source(grammar)
        matcher = llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=LIMITS)
        if matcher.is_error():
            kind = SchemaError if grammar.kind in ("json_schema", "json_object") else GrammarError
            raise kind(f"the {grammar.kind} cannot be enforced: {_reason(matcher.get_error())}")
        return LLCompiled(matcher, LEAST_SIZE + TEXT_WEIGHT * len(source), self._vocabulary)

    def _source(self, grammar: Grammar) -> str:
        """The grammar in the library's language."""
        kind, text = grammar.kind, grammar.text
        if kind in ("json_schema", "json_object"):
            return _json(check.parse_schema(text) if kind == "json_schema" else {"type": "object"})
        if kind == "regex":
            return _regex(translated(text))
        if kind == "choice":
            return _regex("|".join(f"(?:{quoted(choice)})" for choice in _choices(text)))
        if kind == "ebnf":
            return _lark(text)
        if kind == "structural_tag":
            return tags_lark.to_grammar(text, JSON_FORM, special_tokens(self._vocabulary), _to_lark)
        raise GrammarError(f"unknown kind of grammar {kind!r}")


class LLCompiled:
    def __init__(self, matcher: llguidance.LLMatcher, size: int, vocabulary: Vocabulary) -> None:
        self.size = size
        self._matcher = matcher
        self._vocabulary = vocabulary

    def matcher(self) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(self._matcher.deep_copy())


def _contained(method: Callable[P, R]) -> Callable[P, R]:
    """A panic of the library's Rust code, which is no `Exception`, ends the request and not the engine."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except (RadixError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            raise GrammarError(f"the grammar broke its library: {type(error).__name__}") from error

    return call


class LLGuidanceMatcher:
    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    @property
    def done(self) -> bool:
        if self._matcher.is_stopped():
            self._check()
            return True
        return False

    @_contained
    def accept(self, token: int) -> bool:
        # Asked first: consuming a token that is not allowed would look like any other failure.
        if self._matcher.validate_tokens([token]) != 1:
            self._check()
            return False
        if not self._matcher.consume_token(token):
            self._check()
        return True

    @_contained
    def fill_mask(self, words: Words) -> None:
        assert words.flags.c_contiguous
        assert words.dtype == np.int32
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._check()

    @_contained
    def forced(self) -> list[int]:
        tokens = self._matcher.compute_ff_tokens()
        self._check()
        return tokens

    @_contained
    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)
        self._check()

    @_contained
    def fork(self) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(self._matcher.deep_copy())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(f"the grammar is too complex at this point: {_reason(self._matcher.get_error())}")


@lru_cache(maxsize=2)
def _tokenizer(vocabulary: Vocabulary) -> llguidance.LLTokenizer:
    """The vocabulary as the library needs it: half a second for 50,000 tokens, which the interpreter waits for."""
    try:
        return llguidance.LLTokenizer(
            vocabulary.tokenizer,
            n_vocab=vocabulary.size,
            eos_token=list(vocabulary.eos_ids) or None,
            slices=llguidance.LLTokenizer.json_slices(),
        )
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # it raises no narrower class, and panics of its Rust code are no `Exception`
        raise GrammarError(f"this model's tokenizer does not work with llguidance: {error}") from None


def _json(schema: Any) -> str:
    if schema is True:
        schema = {}
    check.check_schema(schema, check.LLGUIDANCE, "llguidance")
    check.common_patterns(schema)
    try:
        text = msgspec.json.encode(schema).decode()
        return llguidance.LLMatcher.grammar_from_json_schema(text, overrides=JSON_FORM)  # type: ignore[arg-type]
    except (ValueError, msgspec.MsgspecError) as error:
        raise SchemaError(f"the schema cannot be read: {_reason(str(error))}") from None


def _regex(expression: str) -> str:
    return llguidance.LLMatcher.grammar_from_regex(expression)


def _choices(text: str) -> list[str]:
    try:
        choices = msgspec.json.decode(text, type=list[str])
    except msgspec.MsgspecError as error:
        raise GrammarError(f"choices must be a list of texts: {error}") from None
    if not choices:
        raise GrammarError("there are no choices")
    return choices


def _lark(text: str) -> str:
    return llguidance.LLMatcher.grammar_from_lark(_to_lark(text))


def _to_lark(text: str) -> str:
    """GBNF, or Lark as llguidance knows it, as Lark."""
    if not text.strip():
        raise GrammarError("the grammar is empty")
    try:
        return str(any_to_lark(text))
    except RecursionError:
        raise GrammarError("the grammar is nested too deep") from None
    except Exception as error:  # the converter raises no narrower class
        raise GrammarError(f"the grammar is malformed: {_reason(str(error))}") from None


@lru_cache(maxsize=2)
def special_tokens(vocabulary: Vocabulary) -> Mapping[str, int]:
    """The vocabulary's special tokens by their text."""
    added = msgspec.json.decode(vocabulary.tokenizer).get("added_tokens") or ()
    return {token["content"]: token["id"] for token in added if token.get("special")}


def _reason(error: str) -> str:
    """What the library says, without backtraces and without repeating the grammar."""
    reason = error.partition("<backtrace>")[0].rpartition("error: ")[2].strip().partition("\n")[0]
    return reason if len(reason) <= LONGEST_REASON else reason[:LONGEST_REASON] + "..."
