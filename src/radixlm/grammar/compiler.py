"""This module owns the making of guides: grammars compiled in threads of their own, kept by content, within limits.

The engine's loop only asks whether a guide is ready. However long a compilation takes, others go on: it is given up
after a time, and what it makes later is dropped. The libraries let other threads run while they compile.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from radixlm.base.errors import RadixError
from radixlm.base.request import Grammar, Request
from radixlm.grammar import select
from radixlm.grammar.base import Compiled, GrammarError, Vocabulary
from radixlm.grammar.guide import SequenceGuide

log = logging.getLogger("radixlm.grammar")

#: Bytes that compiled grammars may be counted for together (see `Compiled.size`).
CACHE_BYTES = 64 << 20

Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """
    Attributes:
        seconds: a compilation may take.
        bytes: a grammar's text may have.
    """

    seconds: float
    bytes: int


@dataclass(slots=True)
class Counters:
    """Totals since the start, for metrics."""

    compiled: int = 0
    cached: int = 0
    refused: int = 0
    seconds: float = 0.0


class _Job:
    """A grammar being compiled; several sequences may wait for it."""

    def __init__(self, key: Key, grammar: Grammar) -> None:
        self.key = key
        self.grammar = grammar
        self.compiled: Compiled | None = None
        self.error: RadixError | None = None
        self.done = False


class Ticket:
    """A guide that is on its way (see `schedule.ports.Ticket`)."""

    def __init__(self, request: Request, job: _Job, vocabulary: Callable[[], Vocabulary], limit: float) -> None:
        self._request = request
        self._job = job
        self._vocabulary = vocabulary
        self._limit = limit
        self._until = time.monotonic() + limit

    def guide(self) -> SequenceGuide | None:
        """The guide, or None as long as there is none. Raises what the compilation raised."""
        job = self._job
        if not job.done:
            if time.monotonic() > self._until:
                raise GrammarError(
                    f"the grammar was not compiled within {self._limit:g} s (--grammar-timeout)", code="grammar_timeout"
                )
            return None
        if job.error is not None:
            raise job.error
        assert job.compiled is not None
        return SequenceGuide(self._request, self._vocabulary(), job.compiled.matcher)


class _Ready:
    """A guide that needs no grammar."""

    def __init__(self, guide: SequenceGuide) -> None:
        self._guide = guide

    def guide(self) -> SequenceGuide:
        return self._guide


class Refused:
    """A grammar that is refused before anybody compiles it."""

    def __init__(self, error: RadixError) -> None:
        self._error = error

    def guide(self) -> None:
        raise self._error


class Compiler:
    """
    Args:
        vocabulary: called when it is first needed, in a worker thread.
        backend: `auto`, the name of a backend, or `none` to refuse grammars.
        threads: compile at once. They are started when there is work.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary], backend: str, limits: Limits, threads: int = 2) -> None:
        self.counters = Counters()
        self._vocabulary = vocabulary
        self._backend = backend
        self._limits = limits
        self._threads = threads
        self._work: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._running: dict[Key, _Job] = {}
        self._kept: OrderedDict[Key, _Job] = OrderedDict()
        self._kept_bytes = 0
        self._started = 0

    def ticket(self, request: Request) -> Ticket | _Ready | Refused | None:
        """What will become the request's guide; None if nothing steers it. Returns at once."""
        grammar = request.grammar
        if grammar is None and request.thinking is None:
            return None
        try:
            if grammar is None:
                return _Ready(SequenceGuide(request, self._vocabulary(), None))
            return Ticket(request, self._job(grammar), self._vocabulary, self._limits.seconds)
        except RadixError as error:
            self.counters.refused += 1
            return Refused(error)

    def warm(self) -> None:
        """Read the vocabulary now: the library does not let other threads run meanwhile. What cannot be read is refused
        when somebody asks for a grammar."""
        name = self._backend if self._backend != "auto" else next(iter(select.BACKENDS)).name
        if self._backend != "none":
            with contextlib.suppress(RadixError, ImportError):
                select.load(name, self._vocabulary())

    def figures(self) -> dict[str, float]:
        """Totals by the names that `observe.metrics` knows."""
        c = self.counters
        return {
            "grammars_compiled": c.compiled,
            "grammars_cached": c.cached,
            "grammars_refused": c.refused,
            "grammar_seconds": c.seconds,
        }

    def _job(self, grammar: Grammar) -> _Job:
        if self._backend == "none":
            raise GrammarError("this server takes no grammars (--grammar-backend none)")
        size = len(grammar.text.encode(errors="replace"))
        if size > self._limits.bytes:
            raise GrammarError(
                f"the grammar has {size} bytes; {self._limits.bytes} are allowed (--max-grammar-bytes)",
                code="grammar_too_large",
            )
        key = (select.choose(grammar, self._backend), grammar.kind, grammar.text)
        with self._lock:
            job = self._kept.get(key) or self._running.get(key)
            if job is not None:
                self.counters.cached += 1
                if key in self._kept:
                    self._kept.move_to_end(key)
                return job
            job = self._running[key] = _Job(key, grammar)
            if self._started < min(self._threads, len(self._running)):
                self._started += 1
                threading.Thread(target=self._serve, name="radixlm-grammar", daemon=True).start()
        self._work.put(job)
        return job

    # ---- worker threads

    def _serve(self) -> None:
        while True:
            self._compile(self._work.get())

    def _compile(self, job: _Job) -> None:
        started = time.perf_counter()
        try:
            job.compiled = select.load(job.key[0], self._vocabulary()).compile(job.grammar)
        except RadixError as error:
            job.error = error
        except BaseException as error:  # a panic of a library in Rust is no `Exception`, and this thread has to go on
            log.exception("a grammar could not be compiled")
            job.error = GrammarError(f"the grammar could not be compiled: {type(error).__name__}")
        with self._lock:
            job.done = True
            del self._running[job.key]
            self.counters.seconds += time.perf_counter() - started
            if job.compiled is None:
                self.counters.refused += 1
                return
            self.counters.compiled += 1
            self._kept[job.key] = job
            self._kept_bytes += job.compiled.size
            while self._kept_bytes > CACHE_BYTES and len(self._kept) > 1:
                _, old = self._kept.popitem(last=False)
                assert old.compiled is not None
                self._kept_bytes -= old.compiled.size
