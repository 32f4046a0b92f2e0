"""This module owns `SequenceGuide`: what one sequence may say next, or must, by its grammar and its thinking budget.

It knows only the tokens that were taken, so it does not matter who computed them, when, or after how many pauses. What
is forced is spelled one way whether it is sampled under a mask of one token or appended without sampling: that choice
changes the speed and never the text.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from radixlm.base.errors import Internal
from radixlm.base.request import Request
from radixlm.grammar.base import Matcher, Vocabulary, Words

#: More tokens than any sequence has.
ENDLESS = 1 << 30


class SequenceGuide:
    """The phases of a text: reasoning, if the request bounds it or starts its grammar behind it; then the grammar.

    Args:
        begin: makes the matcher when the grammar begins; None if there is no grammar.
    """

    def __init__(self, request: Request, vocabulary: Vocabulary, begin: Callable[[], Matcher] | None) -> None:
        grammar, thinking = request.grammar, request.thinking
        self._vocabulary = vocabulary
        self._begin = begin
        self._after = grammar.after if grammar is not None else ()
        self._end = thinking.end if thinking is not None else ()
        self._budget = thinking.budget if thinking is not None else -1  # -1: nothing counts tokens of reasoning
        self._marked = not self._after  # the tokens that the grammar starts behind have come
        self._matcher: Matcher | None = None
        self._hide_ends = request.sampling.ignore_eos
        self._recent: list[int] = []
        self._ahead: list[int] = []
        self._words: Words = np.zeros(vocabulary.words, np.int32)
        self._look()

    @property
    def done(self) -> bool:
        """Nothing can follow."""
        return self._matcher is not None and not self._ahead and self._matcher.done

    @property
    def slack(self) -> int:
        """So many tokens may be sampled before it has a say."""
        if self._begin is not None or self._ahead:
            return 0
        return ENDLESS if self._budget < 0 else self._budget

    def take(self, token: int) -> None:
        """The next token. Raises `Internal` for one that was not allowed, `GrammarError` for a grammar that proves too
        complex."""
        if self._ahead:
            if token != self._ahead[0]:
                raise Internal("a token was chosen that the grammar does not allow")
            del self._ahead[0]
        if self._matcher is not None:
            if not self._matcher.accept(token):
                raise Internal("a token was chosen that the grammar does not allow")
        else:
            self._reason(token)
        if not self._ahead:
            self._look()

    def forced(self) -> list[int]:
        """The tokens that must come next, in order; empty where there is a choice. Each is to be taken."""
        return self._ahead

    def mask(self) -> Words | None:
        """The ids that may come next, as bits (see `grammar.base.Words`), valid until the next call; None for all."""
        if self._ahead:
            self._words.fill(0)
            self._allow(self._ahead[0])
        elif self._matcher is not None:
            self._matcher.fill_mask(self._words)
            if self._hide_ends:
                self._forbid_ends()
        elif self._begin is not None:
            # The answer must not end before its grammar began.
            self._words.fill(-1)
            self._forbid_ends()
        else:
            return None
        return self._words

    # ---- phases

    def _reason(self, token: int) -> None:
        """A token of the reasoning, or one that ends it."""
        longest = max(len(self._after), len(self._end))
        self._recent = [*self._recent, token][-longest:] if longest else []
        if self._budget >= 0:
            if _ends_with(self._recent, self._end):
                self._budget = -1
            elif not self._ahead and self._budget > 0:
                self._budget -= 1
        if not self._marked and _ends_with(self._recent, self._after):
            self._marked = True
            if not self._ahead:
                self._budget = -1

    def _look(self) -> None:
        """Find what is forced from here. Nothing is ahead yet."""
        if self._matcher is None and self._budget == 0:
            # What the text says of the end already is not said again.
            self._ahead = list(self._end[_overlap(self._recent, self._end) :])
            return
        if self._matcher is None and self._begin is not None and self._marked and self._budget < 0:
            self._matcher = self._begin()
        if self._matcher is not None and not self._matcher.done:
            self._ahead = list(self._matcher.forced())

    def _allow(self, token: int) -> None:
        self._words[token // 32] |= np.int32(np.uint32(1 << token % 32).view(np.int32))

    def _forbid_ends(self) -> None:
        """Take the ends of the text out, unless nothing else would be left."""
        kept = [(token, bool(int(self._words[token // 32]) >> token % 32 & 1)) for token in self._vocabulary.eos_ids]
        for token, _ in kept:
            self._words[token // 32] &= ~np.int32(np.uint32(1 << token % 32).view(np.int32))
        if not self._words.any():
            for token, was in kept:
                if was:
                    self._allow(token)


def _ends_with(tokens: list[int], end: tuple[int, ...]) -> bool:
    return bool(end) and tuple(tokens[-len(end) :]) == end


def _overlap(tokens: list[int], end: tuple[int, ...]) -> int:
    """How many tokens of `end` stand at the end of `tokens` already."""
    for count in range(min(len(tokens), len(end) - 1), 0, -1):
        if tuple(tokens[-count:]) == end[:count]:
            return count
    return 0
