"""This module owns what is on its way to one caller: news of a group of sequences, merged until the caller takes it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from types import TracebackType

from radixlm.base.errors import RadixError, TimedOut
from radixlm.base.pieces import Piece, joined
from radixlm.wire.messages import Fault, Finish, Scores, Stats, TextDelta

#: Bytes of news that may wait for a client who reads too slowly, roughly counted; then its request ends.
UNREAD_BYTES = 16 << 20

#: Bytes that an answer in one piece may take while it is collected. Only log-probabilities can come near it.
WHOLE_BYTES = 512 << 20

#: What a token's id and one log-probability take in memory, roughly.
_ID_BYTES, _SCORE_BYTES = 32, 96


class Abandoned(Exception):
    """The client is gone; nobody waits for the answer."""


class TooSlow(RadixError):
    """The client does not read what it asked for. 499 because a retry would end the same way."""

    status, code, kind = 499, "slow_reader", "aborted_error"


class Pending:
    """News of one sequence since its reader last took some, merged: a slow reader costs one entry, not a queue."""

    __slots__ = (
        "_completion_tokens", "_fault", "_finish", "_ids", "_pieces", "_prompt_scores", "_reasoning_tokens", "_scores",
        "_stats", "_texts", "_vector",
    )  # fmt: skip

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._pieces: list[Piece] = []
        self._completion_tokens = 0
        self._reasoning_tokens = 0
        self._scores: Scores | None = None
        self._prompt_scores: Scores | None = None
        self._finish: Finish | None = None
        self._stats: Stats | None = None
        self._fault: Fault | None = None
        self._vector: bytes | None = None

    def add(self, delta: TextDelta) -> None:
        self._texts.append(delta.text)
        self._ids.extend(delta.ids)
        self._completion_tokens = max(self._completion_tokens, delta.completion_tokens)
        self._reasoning_tokens = max(self._reasoning_tokens, delta.reasoning_tokens)
        self._pieces.extend(delta.pieces)
        self._scores = _joined(self._scores, delta.scores)
        self._prompt_scores = _joined(self._prompt_scores, delta.prompt_scores)
        self._finish = delta.finish or self._finish
        self._stats = delta.stats or self._stats
        self._fault = delta.fault or self._fault
        self._vector = delta.vector or self._vector

    def take(self, uid: int) -> TextDelta:
        delta = TextDelta(
            uid=uid,
            text="".join(self._texts),
            ids=self._ids,
            completion_tokens=self._completion_tokens,
            scores=self._scores,
            prompt_scores=self._prompt_scores,
            finish=self._finish,
            stats=self._stats,
            fault=self._fault,
            pieces=joined(self._pieces),
            reasoning_tokens=self._reasoning_tokens,
            vector=self._vector,
        )
        self._clear()
        return delta


def _size(delta: TextDelta) -> int:
    size = len(delta.text) + _ID_BYTES * len(delta.ids)
    for piece in delta.pieces:
        size += _ID_BYTES + len(piece.text)
    for scores in (delta.scores, delta.prompt_scores):
        if scores is not None:
            size += _SCORE_BYTES * (len(scores.ids) + sum(map(len, scores.top)) + sum(map(len, scores.picked)))
    return size


def _joined(first: Scores | None, second: Scores | None) -> Scores | None:
    """Scores of consecutive positions as one. The first one's lists are extended, so it must be ours."""
    if second is None:
        return first
    if first is None:
        return Scores(list(second.ids), list(second.chosen), list(second.top), list(second.picked))
    first.ids.extend(second.ids)
    first.chosen.extend(second.chosen)
    first.top.extend(second.top)
    first.picked.extend(second.picked)
    return first


class Stream:
    """The answers to one group of requests, by index. Used as a context manager: leaving it ends what still runs.

    Args:
        uids: of the sequences, in the order of their indices.
        leave: called once, when the caller leaves; it cancels what has not ended.
        deadline: `time.time()` seconds after which waiting raises `TimedOut`; 0 for never.
    """

    def __init__(self, uids: tuple[int, ...], leave: Callable[[Stream], None], deadline: float = 0.0) -> None:
        self.uids = uids
        self._leave = leave
        self._deadline = deadline
        self._pending: dict[int, Pending] = {}
        self._running = len(uids)
        self._failed = False
        self._waiter: asyncio.Future[bool] | None = None
        self._abandoned = False
        self._left = False
        self._bytes = 0  # about as many as the news takes that was not taken
        self._limit = 0
        self._excess: RadixError | None = None
        self._cut: RadixError | None = None
        self.when_left: Callable[[], None] | None = None  # called once, when the caller leaves

    @property
    def running(self) -> int:
        """Sequences that have not ended."""
        return self._running

    @property
    def failed(self) -> bool:
        """A sequence ended by a fault."""
        return self._failed

    @property
    def done(self) -> bool:
        """Every sequence ended and all of its news was taken."""
        return self._running == 0 and not self._pending and self._cut is None

    def push(self, index: int, delta: TextDelta, *, terminal: bool) -> None:
        """The hub's side: news of one sequence."""
        if self._cut is not None:
            return  # nobody will be told
        pending = self._pending.get(index)
        if pending is None:
            pending = self._pending[index] = Pending()
        pending.add(delta)
        self._bytes += _size(delta)
        if 0 < self._limit < self._bytes:
            self._cut = self._excess
            self._pending.clear()
            self.close()
        if terminal:
            self._running -= 1
            self._failed = self._failed or delta.fault is not None
        self._wake()

    async def wait(self, timeout: float | None = None) -> bool:
        """Wait for news. True if there is some (or nothing will follow), False after `timeout` seconds of silence.

        Raises:
            Abandoned: the client is gone.
            TimedOut: the deadline passed and the engine did not say so itself.
        """
        if self._pending or self._running == 0 or self._cut is not None:
            self._check_abandoned()
            return True
        return await self._sleep(timeout)

    def take(self) -> list[tuple[int, TextDelta]]:
        """All news there is: at most one merged delta of each sequence, in order of their indices."""
        pending, self._pending = self._pending, {}
        self._bytes = 0
        return [(index, pending[index].take(self.uids[index])) for index in sorted(pending)]

    async def whole(self, *, patient: bool = False) -> list[TextDelta]:
        """Wait until every sequence ended; one delta each that holds everything, in order of their indices.

        A sequence that fails ends the wait early and is then the only one returned, unless `patient`.
        """
        while self._running and not (self._failed and not patient):
            await self._sleep(None)
        self._check_abandoned()
        deltas = [delta for _, delta in self.take()]
        if self._running:
            return [delta for delta in deltas if delta.fault is not None]
        return deltas

    def bound(self, limit: int, excess: RadixError) -> None:
        """From here on, news that nobody takes may grow to so many bytes (about). More end everything: what was not
        taken is forgotten, and whoever waits gets `excess`.
        """
        self._limit = limit
        self._excess = excess

    def abandon(self) -> None:
        """The client is gone: end everything now. Whoever waits gets `Abandoned`."""
        self._abandoned = True
        self.close()
        self._wake()

    def close(self) -> None:
        """End what still runs. Safe to call again."""
        if not self._left:
            self._left = True
            self._leave(self)
            if self.when_left is not None:
                self.when_left()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _sleep(self, timeout: float | None) -> bool:
        """Until the next push; False after `timeout` seconds."""
        self._check_abandoned()
        loop = asyncio.get_running_loop()
        left = self._deadline - time.time() if self._deadline else math.inf
        limit = min(left, math.inf if timeout is None else timeout)
        waiter: asyncio.Future[bool] = loop.create_future()
        self._waiter = waiter
        timer = loop.call_later(max(0.0, limit), _settle, waiter, False) if limit < math.inf else None
        try:
            woken = await waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()
        self._check_abandoned()
        if not woken and left <= limit:
            raise TimedOut("the request was not done within its time limit (--request-timeout)")
        return woken

    def _check_abandoned(self) -> None:
        if self._abandoned:
            raise Abandoned
        if self._cut is not None:
            raise self._cut

    def _wake(self) -> None:
        if self._waiter is not None:
            _settle(self._waiter, True)


def _settle(waiter: asyncio.Future[bool], woken: bool) -> None:
    if not waiter.done():
        waiter.set_result(woken)
