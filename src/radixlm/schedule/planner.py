"""This module owns how a plan is made: which span of which sequence is computed in the next step, and who may enter.

It reads the scheduler's state and changes sequences (spans dispatched, rows and leases taken); the scheduler owns both.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from radixlm.base.plan import Ints, Join, Plan, SharedPrefix
from radixlm.cache.ports import Cache, Lease
from radixlm.schedule.policy import OutputEstimate
from radixlm.schedule.ports import Gate, Order
from radixlm.schedule.queues import Rows, WaitingQueue
from radixlm.schedule.sequence import Sequence
from radixlm.schedule.sharing import Sharing
from radixlm.schedule.writes import Writes

#: While memory is ample a decoding row gets pages for this many tokens at a time: fewer table writes, and runs of
#: neighbouring slots, which some attention paths read without a gather.
RUN = 16

#: Steps until admission is tried again when it admitted nobody and nothing has changed since (only the estimate moves).
RETRY = 8


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Token budgets of one step.

    Decode rows ride on top: each of them is in every step, and there are at most as many as rows. So neither can starve
    the other, and chunks keep their size whoever decodes beside them.

    Attributes:
        tokens: of all extends together.
        chunk: of one extend. It bounds the gap between two tokens of a running stream.
    """

    tokens: int
    chunk: int


@dataclass(slots=True)
class _Span:
    sequence: Sequence
    start: int
    length: int


class OutOfPages(Exception):
    """A running sequence cannot grow. The scheduler pauses somebody and plans again."""


class Planner:
    """
    Args:
        share: decode plans name the groups of rows that share a prefix.
    """

    def __init__(
        self,
        cache: Cache,
        rows: Rows,
        gates: Seq[Gate],
        order: Order,
        estimate: OutputEstimate,
        limits: StepLimits,
        share: bool = False,
    ) -> None:
        self._cache = cache
        self._rows = rows
        self._gates = gates
        self._order = order
        self._estimate = estimate
        self._limits = limits
        self._sharing = Sharing(cache.page_size, share)
        self._step = 0
        self._writes = Writes()
        self._tokens = Writes()
        self._steady: _Steady | None = None
        self._retry_at = 0  # step at which admission is tried again after it came to nothing

    def remapped(self, sequence: Sequence, pages: Iterable[tuple[int, int]]) -> None:
        """Pages of a running row were replaced by equal ones; its page table follows with the next plan."""
        for index, page in pages:
            if index < sequence.known_pages:
                self._writes.add(sequence.row, index, [page])

    def released(self, row: int) -> None:
        """A sequence gave its row back."""
        self._writes.forget(row)

    def changed(self) -> None:
        """Somebody came, left, or was paused: the next plan is made anew, not moved on from the last."""
        self._steady = None
        self._retry_at = 0

    def plan(self, running: list[Sequence], waiting: WaitingQueue, now: float) -> tuple[Plan, list[Sequence]] | None:
        """The next step and its sequences in span order, or None if there is nothing to compute.

        Raises `OutOfPages` with nothing dispatched.
        """
        admitting = bool(waiting) and len(self._rows) > 0 and self._step >= self._retry_at
        if self._steady is not None and not self._writes and not admitting:
            moved = self._steady.move_on(self._cache, self._writes, self._step + 1)
            if moved is not None:
                self._step += 1
                return moved, self._steady.sequences
        self._steady = None

        spans, budget = self._spans_of(running)
        joins: list[Join] = []
        if admitting:
            entered = self._admit(running, waiting, now, budget)
            joins = [_join(span.sequence) for span in entered]
            spans += entered
            if not entered:
                self._retry_at = self._step + RETRY
        if not spans:
            return None
        plan = self._freeze(spans, joins)
        everybody = len(spans) == sum(1 for s in running if s.finish is None)
        if everybody and bool(plan.samples.all()):
            self._steady = _Steady(plan, [span.sequence for span in spans], self._cache.page_size, self._sharing)
        return plan, [span.sequence for span in spans]

    def _spans_of(self, running: list[Sequence]) -> tuple[list[_Span], int]:
        """Spans of running sequences and the tokens left for new ones."""
        decodes: list[_Span] = []
        extends: list[_Span] = []
        for s in running:
            pending = s.pending
            if s.finish is not None or pending <= 0:
                continue
            if s.promised and s.remaining <= 0:
                continue  # its last token is being sampled: nobody needs that token's KV
            (decodes if pending == 1 and s.dispatched >= s.prompt_len else extends).append(
                _Span(s, s.dispatched, pending)
            )
        for span in decodes:
            self._grow(span.sequence, span.start + 1, ample=True)
        budget = self._limits.tokens
        fitting: list[_Span] = []
        for span in extends:
            span.length = min(span.length, self._limits.chunk, budget)
            if span.length <= 0:
                break
            self._grow(span.sequence, span.start + span.length, ample=False)
            budget -= span.length
            fitting.append(span)
        return decodes + fitting, budget

    def _grow(self, sequence: Sequence, upto: int, ample: bool) -> None:
        lease = sequence.lease
        assert lease is not None
        if len(lease.pages) * self._cache.page_size >= upto:
            return
        if ample:
            run = min(-(-upto // RUN) * RUN, sequence.limit)
            if self._cache.headroom() > 4 * RUN * (self._rows.count - len(self._rows)) and self._cache.grow(lease, run):
                return
        if not self._cache.grow(lease, upto):
            raise OutOfPages

    # ---- admission

    def _admit(self, running: list[Sequence], waiting: WaitingQueue, now: float, budget: int) -> list[_Span]:
        entered: list[_Span] = []
        if not len(self._rows) or budget <= 0:
            return entered
        for gate in self._gates:
            gate.begin(running)
        owed = sum(self._still_needs(s) for s in running)
        for sequence in list(self._order.arrange(waiting.as_list(), now)):
            if not len(self._rows) or budget <= 0:
                break
            if not all(gate.admits(sequence) for gate in self._gates):
                continue
            span = self._try(sequence, owed, budget, alone=not running and not entered)
            if span is None:
                break
            waiting.remove(sequence)
            for gate in self._gates:
                gate.admitted(sequence)
            running.append(sequence)
            entered.append(span)
            budget -= span.length
            owed += self._still_needs(sequence)
            if sequence.started == 0.0:
                sequence.started = now
        return entered

    def _still_needs(self, sequence: Sequence) -> float:
        """Tokens of KV that a running sequence is expected to ask for yet."""
        lease = sequence.lease
        held = len(lease.pages) * self._cache.page_size if lease is not None else 0
        known = len(sequence.tokens) + sequence.promised
        return max(known + self._estimate.expected(sequence) - held, 0.0)

    def _try(self, sequence: Sequence, owed: float, budget: int, alone: bool) -> _Span | None:
        """Open a lease, then see whether what is left beside it suffices; if not, undo."""
        known = len(sequence.tokens)
        lease = self._cache.open(
            sequence.token_array(), sequence.request.namespace, sequence.prefix_limit, sequence.request.priority
        )
        own = known - lease.matched + self._estimate.expected(sequence)
        headroom = self._cache.headroom()
        # With nobody else there, only what it surely needs counts: it was checked on arrival that it can be had.
        fits = known - lease.matched <= headroom if alone else owed + own <= headroom
        length = min(known - lease.matched, self._limits.chunk, budget)
        if not fits or not self._cache.grow(lease, lease.matched + length):
            self._cache.close(lease)
            return None
        sequence.lease = lease
        sequence.row = self._rows.take()
        sequence.dispatched = sequence.computed = lease.matched
        sequence.known_pages = lease.matched // self._cache.page_size
        sequence.unwritten = -1  # the join tells all of them
        if sequence.retractions == 0:
            sequence.cached_tokens = min(lease.matched, sequence.prompt_len)
        return _Span(sequence, lease.matched, length)

    # ---- freezing

    def _freeze(self, spans: list[_Span], joins: list[Join]) -> Plan:
        self._step += 1
        count = len(spans)
        samples = np.zeros(count, np.bool_)
        wants_history = False
        decodes = itertools.takewhile(lambda span: span.length == 1, spans)
        shared = self._sharing.groups([_lease(span.sequence) for span in decodes])
        for i, span in enumerate(spans):
            s = span.sequence
            s.dispatched += span.length
            s.in_flight += 1
            if s.pending == 0 and s.remaining > 0:
                samples[i] = True
                s.promised += 1
                wants_history = wants_history or s.wants_history
            self._write_new_pages(s)
            if s.unwritten >= 0:
                self._tokens.add(s.row, s.unwritten, s.tokens[s.unwritten :].tolist())
                s.unwritten = -1
        page_rows, page_index, page_ids = self._writes.take()
        token_rows, token_positions, token_ids = self._tokens.take()
        return Plan(
            step=self._step,
            rows=np.array([span.sequence.row for span in spans], np.int32),
            starts=np.array([span.start for span in spans], np.int32),
            lengths=np.array([span.length for span in spans], np.int32),
            samples=samples,
            joins=tuple(joins),
            page_rows=page_rows,
            page_index=page_index,
            page_ids=page_ids,
            shared=shared,
            token_rows=token_rows,
            token_positions=token_positions,
            token_ids=token_ids,
            wants_history=wants_history,
        )

    def _write_new_pages(self, sequence: Sequence) -> None:
        lease = sequence.lease
        assert lease is not None
        if len(lease.pages) > sequence.known_pages:
            first = sequence.known_pages
            self._writes.add(sequence.row, first, lease.pages[first:])
            sequence.known_pages = len(lease.pages)


def _lease(sequence: Sequence) -> Lease:
    assert sequence.lease is not None
    return sequence.lease


def _join(sequence: Sequence) -> Join:
    lease = _lease(sequence)
    return Join(
        row=sequence.row,
        uid=sequence.uid,
        tokens=sequence.token_array(),
        pages=np.array(lease.pages[: sequence.known_pages], np.int32),
        prompt_len=sequence.prompt_len,
        sampling=sequence.request.sampling,
        logprobs=sequence.logprobs_from_here(),
        pooling=sequence.request.pooling,
    )


class _Steady:
    """Every running row got its token sampled in the last plan: the next plan is that one moved on by one token."""

    def __init__(self, plan: Plan, sequences: list[Sequence], page_size: int, sharing: Sharing) -> None:
        self.sequences = sequences
        self._page_size = page_size
        self._sharing = sharing
        # Looked for when there is a next plan: often somebody joins and there is none.
        self._shared: tuple[SharedPrefix, ...] | None = plan.shared if plan.decode else None
        self._rows = plan.rows
        self._ones: Ints = np.ones(len(sequences), np.int32)
        self._starts = plan.starts + plan.lengths
        self._samples = plan.samples
        # Position whose token is the last one to sample: the plan after it cannot sample.
        self._last = np.array([s.limit - 1 for s in sequences], np.int32)
        self._guided = [s for s in sequences if s.guide is not None]
        self._room = np.array([self._held(s) for s in sequences], np.int32)

    def _held(self, sequence: Sequence) -> int:
        assert sequence.lease is not None
        return len(sequence.lease.pages) * self._page_size

    def move_on(self, cache: Cache, writes: Writes, step: int) -> Plan | None:
        """The next plan, or None if some row needs more than one more token's worth of thought."""
        starts = self._starts
        if (starts >= self._last).any():
            return None
        short = np.flatnonzero(starts >= self._room).tolist()
        if short and not self._grow(cache, writes, short):
            return None
        if self._shared is None:
            self._shared = self._sharing.groups([_lease(s) for s in self.sequences])
        for s in self.sequences:
            s.dispatched += 1
            s.promised += 1
            s.in_flight += 1
        self._starts = starts + 1
        return Plan(
            step,
            self._rows,
            starts,
            self._ones,
            self._samples,
            (),
            *writes.take(),
            self._shared,
            wants_history=any(s.wants_history for s in self._guided),
        )

    def _grow(self, cache: Cache, writes: Writes, short: list[int]) -> bool:
        """Pages for the rows that have none left. False: memory is getting short, the careful path decides."""
        if cache.headroom() <= 4 * RUN * len(self.sequences):
            return False
        for i in short:
            s = self.sequences[i]
            lease = s.lease
            assert lease is not None
            upto = min(-(-(int(self._starts[i]) + 1) // RUN) * RUN, s.limit)
            if not cache.grow(lease, upto):
                return False
            writes.add(s.row, s.known_pages, lease.pages[s.known_pages :])
            s.known_pages = len(lease.pages)
            self._room[i] = self._held(s)
        return True
