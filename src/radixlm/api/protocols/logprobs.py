"""This module owns how log-probabilities look to clients: tokens as text and bytes, alternatives, offsets."""

from __future__ import annotations

import codecs

import msgspec

from radixlm.text.tokenizer import Tokenizer
from radixlm.wire.messages import Scores

#: Stands for minus infinity, as in OpenAI's answers.
LOWEST = -9999.0


def finite(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST


class TokenTexts:
    """Tokens as clients see them. `hide_special`: control words are not part of the text, so they have no bytes."""

    def __init__(self, tokenizer: Tokenizer, *, hide_special: bool) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if hide_special else frozenset()

    def bytes(self, token: int) -> bytes:
        """What the token adds to the text."""
        return b"" if token in self._hidden else self._tokenizer.token_bytes(token)

    def text(self, token: int) -> str:
        """A name for the token, different for different bytes: a part of a character reads `bytes:\\xf0\\x9f`."""
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatLogprob]
    refusal: None = None


def chat_logprobs(scores: Scores, texts: TokenTexts) -> ChatLogprobs:
    content = []
    for token, chosen, top in zip(scores.ids, scores.chosen, scores.top, strict=True):
        alternatives = [TopLogprob(texts.text(i), finite(value), list(texts.bytes(i))) for i, value in top]
        content.append(ChatLogprob(texts.text(token), finite(chosen or 0.0), list(texts.bytes(token)), alternatives))
    return ChatLogprobs(content)


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Lists of equal length. A position that nothing precedes has null for its score and its alternatives."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Offsets:
    """Where each token of a choice begins in its text, as the tokens come.

    A token that only completes a character later begins where that character does; a hidden one takes no room.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._next = 0

    def within(self, text: str, tokens: list[int], texts: TokenTexts) -> list[int]:
        """Of the tokens that a known text begins with. Those that are not in it (a start token) take no room."""
        offsets = []
        for token in tokens:
            offsets.append(self._next)
            piece = self._decoder.decode(texts.bytes(token))
            if text.startswith(piece, self._next):
                self._next += len(piece)
        self._next = len(text)
        self._decoder.reset()
        return offsets

    def onward(self, tokens: list[int], texts: TokenTexts) -> list[int]:
        """Of the next tokens of the answer."""
        offsets = []
        for token in tokens:
            offsets.append(self._next)
            self._next += len(self._decoder.decode(texts.bytes(token)))
        return offsets


def completion_logprobs(scores: Scores, offsets: list[int], texts: TokenTexts) -> CompletionLogprobs:
    """The chosen token is among its alternatives, so there may be one more than was asked for."""
    tops: list[dict[str, float] | None] = []
    for token, chosen, top in zip(scores.ids, scores.chosen, scores.top, strict=True):
        if chosen is None:
            tops.append(None)
            continue
        alternatives = {texts.text(i): finite(value) for i, value in top}
        alternatives.setdefault(texts.text(token), finite(chosen))
        tops.append(alternatives)
    return CompletionLogprobs(
        tokens=[texts.text(token) for token in scores.ids],
        token_logprobs=[None if chosen is None else finite(chosen) for chosen in scores.chosen],
        top_logprobs=tops,
        text_offset=offsets,
    )


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )
