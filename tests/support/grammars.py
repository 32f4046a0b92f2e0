"""Grammars over the default model's vocabulary, and texts drawn from them: a model with random scores, without the
model.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from radixlm.base.request import Grammar
from radixlm.grammar.base import Compiled, Matcher, Vocabulary
from radixlm.grammar.llguidance import LLGuidance
from radixlm.text.tokenizer import Tokenizer
from support.models import packaged

EOS = (2, 0)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.of(packaged())


@cache
def vocabulary() -> Vocabulary:
    file = packaged().tokenizer_file
    assert file is not None
    return Vocabulary(file.read_text(encoding="utf-8"), tokenizer().vocab_size, EOS)


def compiled(kind: str, text: str) -> Compiled:
    return LLGuidance(vocabulary()).compile(Grammar(kind=kind, text=text))


def allowed(matcher: Matcher) -> np.ndarray:
    """[vocabulary] bool."""
    words = np.zeros(vocabulary().words, np.int32)
    matcher.fill_mask(words)
    return np.unpackbits(words.view(np.uint8), bitorder="little", count=vocabulary().size).astype(bool)


@cache
def _closing() -> tuple[int, ...]:
    return tuple(tokenizer().encode(text, add_special_tokens=False)[0] for text in ('"', "}", "]", '"}', '"]', ","))


def draw(grammar: Compiled, rng: np.random.Generator, most: int = 200) -> str | None:
    """A text of the grammar, each token drawn from all that are allowed, with a bent towards ends. None: it had no end
    after `most` tokens.
    """
    matcher, ids = grammar.matcher(), list[int]()
    while not matcher.done and len(ids) < most:
        mask = allowed(matcher)
        assert mask.any()
        if mask[list(EOS)].any() and rng.random() < 0.3:
            return tokenizer().decode(ids, False)
        mask[list(EOS)] = False
        near = [token for token in _closing() if mask[token]]
        token = int(rng.choice(near if near and rng.random() < 0.3 else np.flatnonzero(mask)))
        assert matcher.accept(token)
        ids.append(token)
    return tokenizer().decode(ids, False) if matcher.done else None


def accepts(grammar: Compiled, text: str) -> bool:
    """The whole text is taken, byte by byte, and the end is allowed."""
    matcher = grammar.matcher()
    for byte in text.encode():
        token = _bytes()[byte]
        if matcher.done or not matcher.accept(token):
            return False
    return matcher.done or bool(allowed(matcher)[list(EOS)].any())


@cache
def _bytes() -> dict[int, int]:
    """Byte -> the token that is this byte alone."""
    found = {}
    for token in range(vocabulary().size):
        piece = tokenizer().token_bytes(token)
        if len(piece) == 1 and token not in tokenizer().special_ids:
            found.setdefault(piece[0], token)
    return found
