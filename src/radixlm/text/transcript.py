"""This module owns `Transcript`: what one sequence has said and how much of it the api process has been told."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from radixlm.base.pieces import Piece, joined
from radixlm.text.detok import Detok
from radixlm.text.parsers.engine import Parser
from radixlm.text.stop import StopScan
from radixlm.wire.messages import Begin, Extra, Finish, Scores, Stats, TextDelta


class Transcript:
    """The text state of one sequence.

    Attributes:
        ids: tokens that the api has not been told of; the owner appends.
        scan: watches for stops, if there are any. With it tokens are decoded as they come, else when they are due.
            Stops are looked for in the text as it is, before a parser takes it apart.
        finish: how the engine says it ended.
    """

    __slots__ = (
        "_decoded", "_detok", "_parser", "_parts", "_pieces", "_prompt_scores", "_prompt_tokens", "_reasoning",
        "_scores", "_sent", "_stats", "_text", "_vector", "finish", "ids", "scan", "uid",
    )  # fmt: skip

    def __init__(self, begin: Begin, detok: Detok, scan: StopScan | None, parser: Parser | None = None) -> None:
        self.uid = begin.uid
        self.ids: list[int] = []
        self.scan = scan
        self.finish: Finish | None = None
        self._text = begin.text
        self._prompt_tokens = begin.prompt_tokens
        self._detok = detok
        self._parser = parser
        self._decoded = 0  # of `ids`
        self._parts: list[str] = []  # text of the decoded ids, less what is held back
        self._pieces: list[Piece] = []  # what the parser made of the same text
        self._reasoning = 0  # tokens of reasoning so far
        self._sent = 0  # tokens of earlier deltas
        self._scores: list[Scores] = []
        self._prompt_scores: list[Scores] = []
        self._stats: Stats | None = None
        self._vector: bytes | None = None

    @property
    def count(self) -> int:
        """Tokens so far; after a stop, up to and including the one that completed it."""
        return self._sent + len(self.ids)

    @property
    def matched(self) -> str | None:
        return self.scan.matched if self.scan is not None else None

    @property
    def due(self) -> bool:
        """A stream wants news now: of the first token at once, then of every `stream_interval`."""
        fresh = len(self.ids)
        return self._text.stream and fresh > 0 and (self._sent == 0 or fresh >= self._text.stream_interval)

    def take(self, extra: Extra) -> None:
        if extra.scores is not None:
            self._scores.append(extra.scores)
        if extra.prompt_scores is not None:
            self._prompt_scores.append(extra.prompt_scores)
        if extra.stats is not None:
            self._stats = extra.stats
        if extra.vector is not None:
            self._vector = extra.vector
        self.finish = extra.finish

    def decode(self, upto: int | None = None) -> None:
        """Decode the first `upto` of `ids` (all by default). Ids behind the one that completes a stop are dropped."""
        begin, self._decoded = self._decoded, len(self.ids) if upto is None else upto
        fresh = self.ids[begin : self._decoded]
        if self.scan is None and self._parser is None:
            self._parts.append(self._detok.push(fresh))
            return
        for index, token in enumerate(fresh, begin + 1):
            self._read(token, armed=self._sent + index >= self._text.min_new_tokens)
            if self.matched is not None:
                del self.ids[index:]
                return

    def _read(self, token: int, armed: bool) -> None:
        thinking = self._parser is not None and self._parser.thinking
        text, scan = self._detok.push((token,)), self.scan
        if scan is not None:
            text = scan.feed(text, armed)
            if armed and scan.matched is None and (tail := self._detok.tail()) and scan.stops_on(tail):
                text += scan.feed(tail)
        self._show(text)
        if self._parser is not None:
            self._reasoning += thinking or self._parser.thinking

    def _show(self, text: str) -> None:
        self._parts.append(text)
        if self._parser is not None and text:
            self._pieces += self._parser.feed(text)

    def delta(self) -> TextDelta | None:
        """News for a stream, or None while all text is held back and there are no scores to tell."""
        self.decode()
        text = "".join(self._parts)
        if not text and not self._scores and not self._prompt_scores:
            self._parts.clear()
            return None
        return self._news(text)

    def end(self, now: float) -> TextDelta:
        """The terminal message: after the engine's `finish`, or once a stop has `matched`.

        The text of a token that ended the sequence is not shown unless stops are kept; text held back is.
        """
        finish = self.finish
        shown = len(self.ids)
        if finish is not None and finish.kind == "stop" and not self._text.keep_stop:
            shown -= bool(self.ids and self.ids[-1] == finish.matched)
        if self.matched is None:
            self.decode(shown)
        if self.matched is None:
            rest = self._detok.finish()
            if self.scan is not None:
                rest = self.scan.feed(rest, armed=self.count >= self._text.min_new_tokens) + self.scan.flush()
            self._show(rest)
        if self._parser is not None:
            self._pieces += self._parser.finish()
        if self.matched is not None:
            finish = Finish("stop", self.matched)
        stats = self._stats or Stats(self._prompt_tokens, 0, 0, 0, 0.0, 0.0, 0.0, 0.0)
        ended = stats.ended if self.finish is not None else now  # stats from before the end do not know it
        stats = msgspec.structs.replace(stats, completion_tokens=self.count, ended=ended or now)
        return self._news("".join(self._parts), finish, stats)

    def _news(self, text: str, finish: Finish | None = None, stats: Stats | None = None) -> TextDelta:
        count = self.count
        delta = TextDelta(
            self.uid,
            text,
            self.ids,
            count,
            _merge(self._scores, len(self.ids)),
            _merge(self._prompt_scores),
            finish,
            stats,
            pieces=joined(self._pieces),
            reasoning_tokens=self._reasoning,
            vector=self._vector,
        )
        self.ids, self._parts, self._pieces, self._scores, self._prompt_scores = [], [], [], [], []
        self._decoded, self._sent = 0, count
        return delta


def _merge(parts: Sequence[Scores], most: int | None = None) -> Scores | None:
    """Consecutive scores as one, of at most `most` positions."""
    if not parts:
        return None
    if len(parts) == 1 and (most is None or len(parts[0].ids) <= most):
        return parts[0]
    return Scores(
        ids=[token for part in parts for token in part.ids][:most],
        chosen=[score for part in parts for score in part.chosen][:most],
        top=[top for part in parts for top in part.top][:most],
        picked=[picked for part in parts for picked in part.picked][:most],
    )
