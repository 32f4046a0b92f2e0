"""This module owns every message on the ring, as tagged frozen structs. One-way: nobody blocks on an answer.

    api  -> engine       Submit, Cancel, Query, EndSession
    engine -> detokenizer Begin, Tokens, Failed, Goodbye
    detokenizer -> engine Stop
    detokenizer -> api    Texts
    engine -> api         Boot, Ready, Reply
    detokenizer -> api    Boot, Ready (its own)

For every submitted request the api process gets exactly one terminal message: a `TextDelta` with `finish`, or one with
    `error`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from radixlm.base.facts import EngineFacts
from radixlm.base.pieces import Piece
from radixlm.base.request import Request, TextParams

#: Raised when the meaning of a message changes; both ends must agree (see `codec`).
VERSION = 1


class Finish(msgspec.Struct, frozen=True, array_like=True):
    """Why a sequence ended.

    Attributes:
        kind: stop | length | abort.
        matched: what stopped it: a token id, a stop string, or nothing.
        message: the reason of an abort.
    """

    kind: str
    matched: int | str | None = None
    message: str = ""


class Fault(msgspec.Struct, frozen=True, array_like=True):
    """An error of one request, as it crosses processes (see `base.errors.by_status`).

    Attributes:
        param: the field at fault.
        retry_after: seconds after which it is worth trying again; 0 where nobody can tell.
    """

    status: int
    code: str
    message: str
    param: str = ""
    retry_after: float = 0.0


class Stats(msgspec.Struct, frozen=True, array_like=True):
    """What is known of a sequence when it ends. Times are `time.time()` seconds, 0 if it never got there."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    retractions: int
    arrived: float
    started: float  # first step that computed it
    first_token: float
    ended: float
    jump_forward_tokens: int = 0  # appended without sampling: their text was forced


class Scores(msgspec.Struct, frozen=True, array_like=True):
    """Raw log-probabilities of consecutive tokens. Lists of equal length; see `base.plan.TokenScores`.

    Attributes:
        ids: the tokens that are there.
        chosen: their log-probabilities; None for prompt position 0, which nothing precedes.
        top: for each position the (id, log-probability) alternatives, best first.
        picked: for each position the log-probabilities of `LogprobParams.token_ids`, in their order.
    """

    ids: list[int]
    chosen: list[float | None]
    top: list[list[tuple[int, float]]]
    picked: list[list[float]] = []


# ---- api -> engine


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    request: Request


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """End these sequences; unknown uids are ignored (they may have ended by themselves)."""

    uids: tuple[int, ...]
    reason: str


class Query(msgspec.Struct, frozen=True, tag="query"):
    """Ask the engine something: `stats`, `flush` (drop all unused prefixes), `audit`, `ping`. Answered by `Reply` with
    the same tag.
    """

    ticket: int
    what: str


class EndSession(msgspec.Struct, frozen=True, tag="end_session"):
    """Hold nothing under this name any more (see `cache.holds`); unknown names are ignored."""

    session: str


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Finish what runs, then end the process. `seconds`: what is left after them is aborted."""

    seconds: float


# ---- detokenizer -> engine


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """The text met a stop string: the sequence is complete, later tokens are not wanted."""

    uid: int


# ---- engine -> detokenizer


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """A sequence was accepted; its tokens will follow."""

    uid: int
    prompt_tokens: int
    text: TextParams


class Extra(msgspec.Struct, frozen=True, array_like=True):
    """What only some sequences of a step have.

    Attributes:
        scores: of the token this message carries for `uid`.
        prompt_scores: of prompt tokens, as they are computed; parts arrive in order.
        finish, stats: both set exactly once, in the sequence's last message.
        vector: of a request with `pooling`, float32, little endian; in its last message.
    """

    uid: int
    scores: Scores | None = None
    prompt_scores: Scores | None = None
    finish: Finish | None = None
    stats: Stats | None = None
    vector: bytes | None = None


class Tokens(msgspec.Struct, frozen=True, tag="tokens"):
    """What one step produced: token `ids[i]` (int32, little endian) belongs to sequence `uids[i]` (int64)."""

    uids: bytes
    ids: bytes
    extras: list[Extra] = []


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Terminal: the sequence ends with an error instead of a finish."""

    uid: int
    fault: Fault
    stats: Stats | None = None


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """The engine has ended cleanly; the detokenizer may end too."""


# ---- detokenizer -> api


class TextDelta(msgspec.Struct, frozen=True, array_like=True):
    """News of one sequence.

    Attributes:
        text: what is new since the last delta; never part of a character or of a possible stop string.
        ids: the tokens behind this delta (`text` may lag behind them).
        completion_tokens: so far.
        pieces: what the parsers made of the text, where the request has `parsing`: then they, joined, are the answer.
        scores: of `ids`, with `token_texts` beside them when asked for.
        reasoning_tokens: of `completion_tokens`, those that were reasoning.
        finish or error: terminal. After one of them nothing follows for this uid.
        vector: of a request with `pooling`, see `Extra`.
    """

    uid: int
    text: str = ""
    ids: list[int] = []
    completion_tokens: int = 0
    scores: Scores | None = None
    prompt_scores: Scores | None = None
    finish: Finish | None = None
    stats: Stats | None = None
    fault: Fault | None = None
    pieces: list[Piece] = []
    reasoning_tokens: int = 0
    vector: bytes | None = None


class Texts(msgspec.Struct, frozen=True, tag="texts"):
    deltas: list[TextDelta]


# ---- engine -> api


class Boot(msgspec.Struct, frozen=True, tag="boot"):
    """Progress of a process that is starting, or why it cannot: `error` is one message for the reader."""

    role: str
    stage: str
    fraction: float = 0.0
    error: str = ""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    role: str
    facts: EngineFacts | None = None


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    ticket: int
    body: dict[str, Any]
    fault: Fault | None = None


ToEngine = Submit | Cancel | Query | EndSession | Drain | Stop
ToDetokenizer = Begin | Tokens | Failed | Goodbye
ToApi = Texts | Boot | Ready | Reply
