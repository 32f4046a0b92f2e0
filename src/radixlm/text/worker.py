"""This module owns the text state of every running sequence: tokens come from the engine, text goes to the api.

Per sequence the api gets exactly one terminal message. It is made here when the engine says that the sequence has
ended, or earlier, when its text meets a stop: then the engine is told, and what it still sends for it is dropped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from functools import lru_cache

import numpy as np

from radixlm.base.errors import Internal, RadixError, Unavailable
from radixlm.text.detok import Decoding, Vocabulary
from radixlm.text.parsers.engine import Parser, markers
from radixlm.text.stop import StopRules, compile_stops
from radixlm.text.transcript import Transcript
from radixlm.wire.link import Inbox, Outbox
from radixlm.wire.messages import Begin, Extra, Failed, Fault, Goodbye, Stop, TextDelta, Texts, ToDetokenizer, Tokens

log = logging.getLogger("radixlm.text")


def run(inbox: Inbox[ToDetokenizer], to_api: Outbox[Texts], to_engine: Outbox[Stop], tokenizer: Vocabulary) -> None:
    """Serve until the engine says goodbye. Blocks while there is nothing to do."""
    detokenizer = Detokenizer(tokenizer)
    ended = False
    while not ended:
        messages = inbox.receive(None)
        texts, stops = detokenizer.handle(messages)
        for stop in stops:
            to_engine.send(stop)
        if texts is not None:
            to_api.send(texts)
        ended = any(isinstance(message, Goodbye) for message in messages)


class Detokenizer:
    """All sequences between their `Begin` and their terminal message."""

    def __init__(self, tokenizer: Vocabulary, clock: Callable[[], float] = time.time) -> None:
        self._decoding = Decoding(tokenizer)
        self._rules: Callable[..., StopRules] = lru_cache(maxsize=32)(compile_stops)
        self._clock = clock
        self._live: dict[int, Transcript] = {}
        self._ended: set[int] = set()  # the api has their terminal message, the engine's is still to come
        self._deltas: list[TextDelta] = []
        self._stops: list[Stop] = []

    def handle(self, messages: Iterable[ToDetokenizer]) -> tuple[Texts | None, list[Stop]]:
        """Take what arrived; return what to tell the api and the engine.

        Tokens of several steps that arrive together make one delta of a stream: under load they are fewer and larger.
        """
        touched: dict[int, Transcript] = {}
        for message in messages:
            if isinstance(message, Tokens):
                self._tokens(message, touched)
            elif isinstance(message, Begin):
                self._begin(message)
            elif isinstance(message, Failed):
                self._failed(message)
            else:
                self._goodbye()
        for uid, transcript in touched.items():
            if transcript.due and uid in self._live:
                self._guarded(transcript, self._send)
        texts = Texts(self._deltas) if self._deltas else None
        stops = self._stops
        self._deltas, self._stops = [], []
        return texts, stops

    def _begin(self, begin: Begin) -> None:
        text = begin.text
        try:
            rules = self._rules(text.stop, text.stop_regex, text.keep_stop)
            parser = Parser(text.parsing) if text.parsing is not None else None
            detok = self._decoding.open(text.skip_special_tokens, markers(text.parsing) if text.parsing else ())
        except RadixError as error:
            self._reject(begin.uid, error)
            return
        self._live[begin.uid] = Transcript(begin, detok, rules.scan() if rules else None, parser)

    def _tokens(self, message: Tokens, touched: dict[int, Transcript]) -> None:
        uids: list[int] = np.frombuffer(message.uids, "<i8").tolist()
        ids: list[int] = np.frombuffer(message.ids, "<i4").tolist()
        watching: list[Transcript] = []
        for uid, token in zip(uids, ids, strict=True):
            transcript = self._live.get(uid)
            if transcript is not None:
                transcript.ids.append(token)
                touched[uid] = transcript
                if transcript.scan is not None:
                    watching.append(transcript)
        for extra in message.extras:
            self._extra(extra)
        for transcript in watching:  # those with stops read every token at once
            if transcript.uid in self._live:
                self._guarded(transcript, self._watch)

    def _extra(self, extra: Extra) -> None:
        transcript = self._live.get(extra.uid)
        if transcript is None:
            if extra.finish is not None and extra.uid in self._ended:
                self._ended.remove(extra.uid)
            elif extra.finish is not None:
                error = Internal(f"sequence {extra.uid} ended before it was announced")
                self._reject(extra.uid, error, tell_engine=False)
            return
        transcript.take(extra)
        if extra.finish is not None:
            self._guarded(transcript, self._finish)

    def _failed(self, failed: Failed) -> None:
        transcript = self._live.pop(failed.uid, None)
        if failed.uid in self._ended:
            self._ended.remove(failed.uid)
            return
        count = transcript.count if transcript is not None else 0
        self._deltas.append(TextDelta(failed.uid, completion_tokens=count, fault=failed.fault, stats=failed.stats))

    def _goodbye(self) -> None:
        for uid in list(self._live):
            self._reject(uid, Unavailable("the engine ended before this sequence did"), tell_engine=False)
        self._ended.clear()

    def _guarded(self, transcript: Transcript, work: Callable[[Transcript], None]) -> None:
        """Do one sequence's work; whatever goes wrong in it ends that sequence alone."""
        try:
            work(transcript)
        except Exception as error:
            log.exception("decoding failed", extra={"uid": transcript.uid})
            running = transcript.finish is None
            self._reject(transcript.uid, Internal(f"the tokens could not be decoded: {error!r}"), tell_engine=running)

    def _watch(self, transcript: Transcript) -> None:
        transcript.decode()
        if transcript.matched is not None:
            self._deltas.append(transcript.end(self._clock()))
            self._leave(transcript.uid, tell_engine=True)

    def _finish(self, transcript: Transcript) -> None:
        self._deltas.append(transcript.end(self._clock()))
        self._leave(transcript.uid, tell_engine=False)

    def _send(self, transcript: Transcript) -> None:
        delta = transcript.delta()
        if delta is not None:
            self._deltas.append(delta)

    def _reject(self, uid: int, error: RadixError, tell_engine: bool = True) -> None:
        transcript = self._live.get(uid)
        count = transcript.count if transcript is not None else 0
        fault = Fault(error.status, error.code, error.message)
        self._deltas.append(TextDelta(uid, completion_tokens=count, fault=fault))
        self._leave(uid, tell_engine)

    def _leave(self, uid: int, tell_engine: bool) -> None:
        """The api has its terminal message. `tell_engine`: the engine has not sent its own yet."""
        self._live.pop(uid, None)
        if tell_engine:
            self._ended.add(uid)
            self._stops.append(Stop(uid))
