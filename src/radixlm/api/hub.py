"""This module owns every request in flight in the api process, and the stage of its life the engine is in.

Requests go out as `Submit`; texts come in through `receive` and go to the `Stream` of whoever asked. A sequence stays
in the table until its terminal message arrives, also when its client has left, so that the counts are those of the
engine. Everything here runs on the event loop; another thread hands messages over through `api.reader`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import msgspec

from radixlm.api.stream import Stream
from radixlm.base.errors import RadixError, StartupError, TimedOut, Unavailable, by_status
from radixlm.base.facts import EngineFacts
from radixlm.base.request import Request
from radixlm.wire.link import Outbox
from radixlm.wire.messages import (
    Boot,
    Cancel,
    Drain,
    EndSession,
    Fault,
    Query,
    Ready,
    Reply,
    Submit,
    TextDelta,
    Texts,
    ToApi,
    ToEngine,
)

#: Seconds that a client waits past its deadline for the engine's own word of it.
DEADLINE_GRACE = 5.0

#: Seconds that a drain waits past its limit for the last terminal messages.
DRAIN_GRACE = 2.0

log = logging.getLogger("radixlm.api")


class Stage(Enum):
    STARTING = "starting"
    WARMING = "warming up"  # the ring works; clients are not let in yet
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a starting process is."""

    role: str
    stage: str
    fraction: float


class Witness(Protocol):
    """Is told what became of requests (see `api.witness`)."""

    def streamed(self, request: Request, tokens: int, gap: float) -> None:
        """A stream got `tokens` more, `gap` seconds after the ones before. Not called for its first ones."""
        ...

    def ended(self, request: Request, last: TextDelta, first: float, now: float) -> None:
        """Its terminal message came at `now`, its first tokens at `first` (0: never); both in `time.time()` seconds."""
        ...


@dataclass(slots=True)
class _Live:
    """A sequence in flight. `stream` is None once its client has left; `first` and `last` are when tokens came."""

    request: Request
    index: int
    stream: Stream | None
    group: str
    first: float = 0.0
    last: float = 0.0


class Hub:
    """
    Args:
        outbox: to the engine.
        roles: the processes whose `Ready` makes the ring whole.
        witnesses: told of every request's progress and end.
    """

    def __init__(
        self,
        outbox: Outbox[ToEngine],
        *,
        roles: Iterable[str] = ("engine", "detokenizer"),
        witnesses: Sequence[Witness] = (),
    ) -> None:
        self._outbox = outbox
        self._missing = set(roles)
        self._witnesses = tuple(witnesses)
        self._stage = Stage.STARTING
        self._reason = ""
        self._facts: EngineFacts | None = None
        self._progress: dict[str, Progress] = {}
        self._live: dict[int, _Live] = {}
        self._uids = itertools.count(1)
        self._tickets = itertools.count(1)
        self._questions: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._changed = asyncio.Event()

    # ---- what is known of the engine

    @property
    def stage(self) -> Stage:
        return self._stage

    @property
    def progress(self) -> list[Progress]:
        return list(self._progress.values())

    @property
    def facts(self) -> EngineFacts:
        """Raises `Unavailable` as long as the engine has not told them."""
        if self._facts is None:
            raise self.refusal()
        return self._facts

    @property
    def in_flight(self) -> int:
        """Sequences submitted whose terminal message has not come."""
        return len(self._live)

    def refusal(self) -> RadixError:
        """Why no request is taken now."""
        if self._stage is Stage.DEAD:
            return Unavailable(f"the engine has ended: {self._reason}", code="engine_dead")
        if self._stage is Stage.DRAINING:
            return Unavailable("the server is shutting down", code="shutting_down")
        steps = ", ".join(f"{p.role}: {p.stage} {p.fraction:.0%}" for p in self._progress.values())
        return Unavailable(f"the server is starting{f' ({steps})' if steps else ''}; try again soon", code="starting")

    async def until_whole(self) -> EngineFacts:
        """Wait until every process of the ring has reported.

        Raises:
            StartupError: one of them cannot start; the message is its reason.
        """
        await self._until(lambda: self._stage is not Stage.STARTING)
        if self._stage is Stage.DEAD:
            raise StartupError(self._reason)
        return self.facts

    async def until_ready(self) -> EngineFacts:
        """Wait until clients are let in. Raises as `until_whole`."""
        await self._until(lambda: self._stage not in (Stage.STARTING, Stage.WARMING))
        if self._stage is Stage.DEAD:
            raise StartupError(self._reason)
        return self.facts

    def open(self) -> None:
        """Let clients in."""
        if self._stage is Stage.WARMING:
            self._enter(Stage.READY)

    async def _until(self, condition: Any) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def _enter(self, stage: Stage) -> None:
        self._stage = stage
        self._changed.set()

    # ---- requests

    def submit(self, requests: Sequence[Request], *, group: str = "") -> Stream:
        """Send requests to the engine. Their uids are assigned here, whatever they hold.

        Args:
            group: a name that `abort` knows all of them by, besides their own.

        Raises:
            Unavailable: the server is starting, draining or dead.
        """
        if self._stage not in (Stage.WARMING, Stage.READY):
            raise self.refusal()
        numbered = [msgspec.structs.replace(request, uid=next(self._uids)) for request in requests]
        deadline = max((request.deadline for request in numbered), default=0.0)
        uids = tuple(request.uid for request in numbered)
        stream = Stream(uids, self._leave, deadline + DEADLINE_GRACE if deadline else 0.0)
        for index, request in enumerate(numbered):
            try:
                self._outbox.send(Submit(request))
            except BaseException:
                stream.close()  # ends those that are on their way
                raise
            self._live[request.uid] = _Live(request, index, stream, group)
        return stream

    def abort(self, rid: str, reason: str, tenant: str | None = None) -> int:
        """End the sequences of a request by its client's name (its own or its group's), those of one tenant alone if it
        is given. Their streams get a terminal delta. How many.
        """
        named = [(uid, live) for uid, live in self._live.items() if rid in (live.request.rid, live.group)]
        return self._cancel([uid for uid, live in named if tenant in (None, live.request.tenant)], reason)

    def end_session(self, session: str) -> None:
        """Tell the engine that nothing is to be held for a session any more."""
        if self._stage is not Stage.DEAD:
            self._outbox.send(EndSession(session))

    def abort_all(self, reason: str) -> int:
        return self._cancel(list(self._live), reason)

    def _cancel(self, uids: list[int], reason: str) -> int:
        if uids:
            self._outbox.send(Cancel(tuple(uids), reason))
        return len(uids)

    def _leave(self, stream: Stream) -> None:
        """Nobody reads a stream any more: end what still runs, keep count of it until the engine has."""
        running = [uid for uid in stream.uids if uid in self._live]
        for uid in running:
            self._live[uid].stream = None
        if self._stage is not Stage.DEAD:
            self._cancel(running, "the client left")

    # ---- questions

    async def query(self, what: str, timeout: float = 10.0) -> dict[str, Any]:
        """Ask the engine something (see `wire.messages.Query`).

        Raises:
            TimedOut: no answer within `timeout` seconds.
            Unavailable: there is no engine to ask.
            RadixError: the engine's own refusal.
        """
        if self._stage in (Stage.STARTING, Stage.DEAD):
            raise self.refusal()
        ticket = next(self._tickets)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._questions[ticket] = answer
        try:
            self._outbox.send(Query(ticket, what))
            async with asyncio.timeout(timeout):
                return await answer
        except TimeoutError:
            raise TimedOut(f"the engine did not answer {what!r} within {timeout:g} s") from None
        finally:
            del self._questions[ticket]

    # ---- messages

    def receive(self, messages: Iterable[ToApi]) -> None:
        """Take what the ring sent, in order. Call it on the event loop."""
        for message in messages:
            if isinstance(message, Texts):
                now = time.time()
                for delta in message.deltas:
                    self._text(delta, now)
            elif isinstance(message, Reply):
                self._reply(message)
            elif isinstance(message, Ready):
                self._process_ready(message)
            else:
                self._boot(message)

    def _text(self, delta: TextDelta, now: float) -> None:
        live = self._live.get(delta.uid)
        if live is None:
            return  # its terminal message was made here, when the engine died or did not end in time
        terminal = delta.finish is not None or delta.fault is not None
        if delta.ids:
            self._note_tokens(live, len(delta.ids), now)
        if terminal:
            del self._live[delta.uid]
            for witness in self._witnesses:
                witness.ended(live.request, delta, live.first, now)
        if live.stream is not None:
            live.stream.push(live.index, delta, terminal=terminal)
        if terminal and not self._live:
            self._changed.set()

    def _note_tokens(self, live: _Live, tokens: int, now: float) -> None:
        if live.first and live.request.text.stream:
            for witness in self._witnesses:
                witness.streamed(live.request, tokens, max(0.0, now - live.last))
        live.first = live.first or now
        live.last = now

    def _reply(self, message: Reply) -> None:
        answer = self._questions.get(message.ticket)
        if answer is None or answer.done():
            return
        if message.fault is None:
            answer.set_result(message.body)
        else:
            fault = message.fault
            answer.set_exception(by_status(fault.status, fault.message, fault.code, None, fault.retry_after))

    def _process_ready(self, message: Ready) -> None:
        self._missing.discard(message.role)
        self._progress.pop(message.role, None)
        self._facts = message.facts or self._facts
        if not self._missing and self._stage is Stage.STARTING:
            if self._facts is None:
                self.engine_died("no process of the ring told the facts of the model")
                return
            self._enter(Stage.WARMING)

    def _boot(self, message: Boot) -> None:
        if message.error:
            self.engine_died(message.error)
        else:
            self._progress[message.role] = Progress(message.role, message.stage, message.fraction)

    # ---- the end

    def engine_died(self, reason: str) -> None:
        """The ring is broken: everything in flight ends with 503, nothing more is taken. The first reason is kept."""
        if self._stage is Stage.DEAD:
            return
        self._reason = reason
        self._stage = Stage.DEAD
        self._fail_all(Fault(503, "engine_dead", f"the engine has ended: {reason}"))
        for answer in self._questions.values():
            if not answer.done():
                answer.set_exception(self.refusal())
        self._changed.set()

    async def drain(self, seconds: float) -> None:
        """Take nothing new, let what runs finish, and return when nothing is in flight.

        After `seconds` the engine aborts what is left; what it does not end within a short grace then ends here.
        """
        if self._stage is Stage.DEAD:
            return
        self._enter(Stage.DRAINING)
        self._outbox.send(Drain(seconds))
        try:
            async with asyncio.timeout(seconds + DRAIN_GRACE):
                await self._until(lambda: not self._live)
        except TimeoutError:
            log.warning("%d requests did not end in time; ending them without the engine", len(self._live))
            self._fail_all(Fault(503, "shutting_down", "the server shut down before the request was done"))

    def _fail_all(self, fault: Fault) -> None:
        now = time.time()
        for uid in list(self._live):
            self._text(TextDelta(uid, fault=fault), now)
