"""This module owns sessions: conversations whose turns are kept here as token ids, in a tree, until they are closed.

The engine holds the KV of a session's turns softly (`cache.holds`); what a turn says is the api process's business, so
a session survives the loss of its pages.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from radixlm.api.hub import Hub
from radixlm.api.sse import Form
from radixlm.base.errors import BadRequest, Conflict, NotFound
from radixlm.wire.messages import TextDelta

MAX_SESSIONS = 1024

#: Turns of one session.
MAX_TURNS = 256


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn that has ended.

    Attributes:
        parent: name of the turn that it went on from, "" for none.
        prompt: all ids that the model saw.
        output: the ids that it generated.
    """

    parent: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]


@dataclass(slots=True)
class Session:
    """
    Attributes:
        timeout: seconds without a turn after which it is closed; 0 for never.
        turns: by name (the `rid` of the request).
        running: names of turns that have not ended.
    """

    timeout: float
    turns: dict[str, Turn] = field(default_factory=dict)
    running: set[str] = field(default_factory=set)
    timer: asyncio.TimerHandle | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a new turn goes: behind `context`, as a child of `parent`, perhaps in place of the others there."""

    session: str
    parent: str
    context: tuple[int, ...]
    replace: bool


class Sessions:
    """The sessions of a server. Used on the event loop alone."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._sessions: dict[str, Session] = {}

    def open(self, name: str | None, timeout: float) -> str:
        """Begin a session; its name, made up if none is given.

        Raises:
            Conflict: there is one of that name.
            BadRequest: there are too many.
        """
        name = name or uuid.uuid4().hex
        if name in self._sessions:
            raise Conflict(f"there is a session {name[:80]!r} already", param="session_id", code="session_exists")
        if len(self._sessions) >= MAX_SESSIONS:
            raise BadRequest(f"{MAX_SESSIONS} sessions are open; close one first", param="session_id")
        self._sessions[name] = Session(timeout)
        self._rest(name)
        return name

    def close(self, name: str) -> None:
        """End a session: its running turns are aborted, its turns forgotten, its pages no longer held.

        Raises:
            NotFound: there is none of that name.
        """
        session = self._get(name, "session_id")
        del self._sessions[name]
        if session.timer is not None:
            session.timer.cancel()
        for rid in session.running:
            self._hub.abort(rid, "the session was closed")
        self._hub.end_session(name)

    def place(self, name: str, rid: str | None, offset: int | None, *, replace: bool, drop_output: bool) -> Place:
        """Where the next turn of a session goes.

        Args:
            rid: the turn to go on from; None begins anew.
            offset: how many ids of the context are kept; None, 0 or -1 for all of them.
            replace: the turns that went on from `rid` are forgotten (without `rid`: all turns).
            drop_output: what the turn `rid` answered is left out.

        Raises:
            NotFound: there is no such session.
            BadRequest: there is no such turn, or it still runs, or `offset` is not within its context.
        """
        session = self._get(name, "session_params.id")
        if rid is not None and rid not in session.turns:
            still = ": it has not ended" if rid in session.running else ""
            raise BadRequest(f"session {name[:80]!r} has no turn {rid[:80]!r}{still}", param="session_params.rid")
        if not replace and len(session.turns) + len(session.running) >= MAX_TURNS:
            raise BadRequest(f"a session has {MAX_TURNS} turns at most; replace some", param="session_params")
        if rid is None:
            if offset not in (None, 0, -1):
                raise BadRequest("session_params.offset needs rid", param="session_params.offset")
            return Place(name, "", (), replace)
        turn = session.turns[rid]
        context = turn.prompt if drop_output else turn.prompt + turn.output
        if offset not in (None, 0, -1):
            assert offset is not None
            if not 0 < offset <= len(context):
                raise BadRequest(
                    f"session_params.offset is {offset}; that turn has {len(context)} tokens",
                    param="session_params.offset",
                )
            context = context[:offset]
        return Place(name, rid, context, replace)

    def begin(self, place: Place, rid: str) -> None:
        """A turn was made of a place and is about to run. Raises `BadRequest` if the name is taken."""
        session = self._get(place.session, "session_params.id")
        if rid in session.turns or rid in session.running:
            raise BadRequest(f"the session has a turn {rid[:80]!r} already; give another rid", param="rid")
        if place.replace:
            _forget(session.turns, place.parent)
        session.running.add(rid)
        self._rest(place.session)

    def end(self, place: Place, rid: str, turn: Turn | None) -> None:
        """A turn has ended; None: it failed or was left, and is not kept."""
        session = self._sessions.get(place.session)
        if session is None or rid not in session.running:
            return
        session.running.discard(rid)
        if turn is not None and (not turn.parent or turn.parent in session.turns):
            session.turns[rid] = turn
        self._rest(place.session)

    def _get(self, name: str, param: str) -> Session:
        session = self._sessions.get(name)
        if session is None:
            raise NotFound(f"there is no session {name[:80]!r}", param=param, code="session_not_found")
        return session

    def _rest(self, name: str) -> None:
        """The time-out begins anew."""
        session = self._sessions[name]
        if session.timer is not None:
            session.timer.cancel()
        if session.timeout:
            session.timer = asyncio.get_running_loop().call_later(session.timeout, self._expire, name)

    def _expire(self, name: str) -> None:
        if self._sessions[name].running:
            self._rest(name)
        else:
            self.close(name)


def _forget(turns: dict[str, Turn], root: str) -> None:
    """Drop every turn that went on from `root`, directly or not; "" drops all."""
    doomed = {root}
    for name, turn in list(turns.items()):  # parents come before children
        if turn.parent in doomed:
            doomed.add(name)
            del turns[name]


class TurnForm:
    """A form around another: it hears what a turn says, and keeps it in the session when it has ended."""

    def __init__(self, inner: Form, sessions: Sessions, place: Place, rid: str, prompt: tuple[int, ...]) -> None:
        self.patient = inner.patient
        self._inner = inner
        self._sessions = sessions
        self._place = place
        self._rid = rid
        self._prompt = prompt
        self._output: list[int] = []
        sessions.begin(place, rid)

    def whole(self, results: list[TextDelta]) -> bytes:
        self._hear(results[0])
        return self._inner.whole(results)

    def piece(self, index: int, delta: TextDelta) -> Iterator[bytes]:
        self._hear(delta)
        yield from self._inner.piece(index, delta)

    def last(self) -> Iterable[bytes]:
        return self._inner.last()

    def left(self) -> None:
        """Nobody hears any more: a turn that has not ended is not kept."""
        self._sessions.end(self._place, self._rid, None)

    def _hear(self, delta: TextDelta) -> None:
        self._output.extend(delta.ids)
        if delta.finish is not None and delta.finish.kind != "abort":
            turn = Turn(self._place.parent, self._prompt, tuple(self._output))
            self._sessions.end(self._place, self._rid, turn)
        elif delta.fault is not None or delta.finish is not None:
            self.left()
