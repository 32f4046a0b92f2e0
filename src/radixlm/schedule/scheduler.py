"""This module owns every live sequence: it takes requests in, plans steps, commits outcomes and ends what is done.

Two calls drive it: `plan()` before a step, `commit()` after. It never waits and never touches a device.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from radixlm.base.errors import RadixError
from radixlm.base.plan import Ints, Outcome, Plan
from radixlm.base.request import Request
from radixlm.cache.holds import Holds
from radixlm.cache.ports import Cache
from radixlm.schedule.committer import Committer, fault_of
from radixlm.schedule.fairness import FairShare, crowded_out
from radixlm.schedule.gates import PrefixGate
from radixlm.schedule.guide import MakeTicket
from radixlm.schedule.planner import OutOfPages, Planner, StepLimits
from radixlm.schedule.policy import OutputEstimate, WaitEstimate, make_order
from radixlm.schedule.ports import Gate, Order
from radixlm.schedule.queues import Rows, WaitingQueue
from radixlm.schedule.sequence import Sequence
from radixlm.schedule.steering import Steering
from radixlm.wire.messages import Begin, Extra, Failed, Fault, Finish, ToDetokenizer, Tokens

#: Deadlines are looked at this often, in seconds.
DEADLINE_INTERVAL = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the scheduler needs of the configuration and the model.

    Attributes:
        context_length: longest sequence in tokens.
        queue_timeout, request_timeout: seconds; 0 for no limit.
        preemption: None, or the priority difference at which a running sequence makes way.
        shared_prefix: decode plans name the rows that share a prefix (`Plan.shared`).
        fair: tenants get shares of the engine by weight (see `fairness`).
        jump_forward: forced tokens that are worth a longer span (see `steering`); 0: they are sampled one by one.
    """

    context_length: int
    eos_ids: frozenset[int]
    max_running: int
    max_queued: int
    step: StepLimits
    policy: str = "fcfs"
    lpm_max_wait: float = 5.0
    conservativeness: float = 1.0
    queue_timeout: float = 0.0
    request_timeout: float = 0.0
    preemption: int | None = None
    shared_prefix: bool = False
    jump_forward: int = 1
    fair: bool = False
    seed: int = 0


@dataclass(slots=True)
class Counters:
    """Totals since the start, for metrics."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    retractions: int = 0
    aborted: int = 0
    finished_stop: int = 0
    finished_length: int = 0
    finished_abort: int = 0
    steps: int = 0
    jump_forward_tokens: int = 0


@dataclass(slots=True)
class _Flight:
    plan: Plan
    sequences: list[Sequence]


class Scheduler:
    """
    Args:
        make_ticket: starts to make what steers a request (see `guide`); None: no request is steered.
    """

    def __init__(self, cache: Cache, settings: Settings, make_ticket: MakeTicket | None = None) -> None:
        self.cache = Holds(cache)
        self.settings = settings
        self.counters = Counters()
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self._live: dict[int, Sequence] = {}
        self._rows = Rows(settings.max_running)
        self._estimate = OutputEstimate(settings.conservativeness)
        self._waits = WaitEstimate()
        gates: list[Gate] = [PrefixGate(self.cache)]
        self._steering: Steering | None = None
        if make_ticket is not None:
            self._steering = Steering(make_ticket, settings.jump_forward)
            gates.append(self._steering)
        order: Order = make_order(settings.policy, self.cache, settings.lpm_max_wait, settings.seed)
        if settings.fair:
            order = fair = FairShare(order)
            gates.append(fair)
        self._planner = Planner(
            self.cache, self._rows, gates, order, self._estimate, settings.step, settings.shared_prefix
        )
        self._committer = Committer(self.cache, self._planner, self._ended, self._steering)
        self._flights: deque[_Flight] = deque()
        self._look_at_deadlines = 0.0
        self._outbox: list[ToDetokenizer] = []

    # ---- questions

    @property
    def idle(self) -> bool:
        """Nothing to compute and nothing in flight."""
        return not (self.waiting or self.running or self._flights)

    @property
    def ratio(self) -> float:
        """The share of possible output that admission sets aside (see `policy.OutputEstimate`)."""
        return self._estimate.ratio

    def take_messages(self) -> list[ToDetokenizer]:
        """News since the last call, in order."""
        messages, self._outbox = self._outbox, []
        return messages

    # ---- requests in and out

    def submit(self, request: Request) -> None:
        """Queue a request, or refuse it with a `Failed` message if it can never run."""
        fault = self._refusal(request)
        if fault is not None:
            self._outbox.append(Failed(request.uid, fault))
            return
        room = min(self.settings.context_length, self.cache.pages * self.cache.page_size + 1)
        limit = min(len(request.tokens) + request.sampling.max_new_tokens, room)
        sequence = Sequence(request, limit, self.settings.eos_ids)
        self._live[request.uid] = sequence
        self.waiting.add(sequence)
        self._planner.changed()
        self._outbox.append(Begin(request.uid, sequence.prompt_len, request.text))
        if self._steering is not None:
            self._steering.arrived(sequence)

    def _refusal(self, request: Request) -> Fault | None:
        length, pool = len(request.tokens), self.cache.pages * self.cache.page_size
        if request.uid in self._live:
            return Fault(409, "duplicate_uid", f"sequence {request.uid} is already there")
        if self._steering is None and (request.grammar is not None or request.thinking is not None):
            return Fault(501, "not_served", "this engine takes no grammars and no budgets for thinking")
        if length == 0:
            return Fault(400, "empty_prompt", "the prompt has no tokens")
        if length > self.settings.context_length:
            return Fault(
                400,
                "context_length_exceeded",
                f"the prompt has {length} tokens; the context length is {self.settings.context_length}",
            )
        if length > pool:
            return Fault(
                400,
                "context_length_exceeded",
                f"the prompt has {length} tokens; the KV pool holds {pool} (--mem-fraction-static, --max-total-tokens)",
            )
        if len(self.waiting) >= self.settings.max_queued:
            full = self._full()
            other = crowded_out(self.waiting, request.tenant, request.share) if self.settings.fair else None
            if other is None:
                return full
            self._fail(other, full, request.arrival)
        return None

    def _full(self) -> Fault:
        count = len(self.waiting)
        wait = self._waits.seconds(count)
        message = f"{count} requests are waiting, which is the limit; try again in {wait:.0f} s"
        return Fault(429, "queue_full", message, retry_after=wait)

    def cancel(self, uid: int, reason: str, now: float) -> bool:
        """End a sequence with finish kind `abort`. False if it is not there (it may have ended by itself)."""
        sequence = self._live.get(uid)
        if sequence is None or sequence.finish is not None:
            return False
        self._close(sequence, Finish("abort", None, reason), now)
        self.counters.aborted += 1
        return True

    def stop(self, uid: int, now: float) -> None:
        """The text of a sequence is complete (a stop string was met); what is in flight for it is dropped."""
        sequence = self._live.get(uid)
        if sequence is not None and sequence.finish is None:
            self._close(sequence, Finish("stop"), now)

    def end_session(self, session: str) -> None:
        """Hold nothing for it any more."""
        self.cache.drop(session)
        self._planner.changed()

    def cancel_all(self, reason: str, now: float) -> None:
        for uid in list(self._live):
            self.cancel(uid, reason, now)

    def fail_running(self, reason: str, now: float) -> None:
        """End every running sequence with an error: the device's tables can no longer be trusted for them."""
        for sequence in list(self.running):
            if sequence.finish is None:
                self._fail(sequence, Fault(500, "step_failed", reason), now)

    def _fail(self, sequence: Sequence, fault: Fault, now: float) -> None:
        sequence.finish = Finish("abort", None, fault.message)
        self._outbox.append(Failed(sequence.uid, fault, sequence.stats(now)))
        self._ended(sequence, fault, now)

    def _close(self, sequence: Sequence, finish: Finish, now: float) -> None:
        """End a sequence from outside a step."""
        sequence.finish = finish
        self._outbox.append(Tokens(b"", b"", [Extra(sequence.uid, None, None, finish, sequence.stats(now))]))
        self._ended(sequence, finish, now)

    def _ended(self, sequence: Sequence, how: Finish | Fault, now: float) -> None:
        """A sequence got its terminal message. Its row and pages stay until no step in flight touches them."""
        self._planner.changed()
        if not sequence.ended:
            sequence.ended = True
            self._count(sequence, how)
            if sequence.row < 0:
                self.waiting.remove(sequence)
            else:
                self._publish(sequence)  # now, so that a next turn that is sent at once finds it
        if sequence.in_flight:
            return
        if sequence.row >= 0:
            self.running.remove(sequence)
            if sequence.request.session and sequence.finish is not None and sequence.finish.kind != "abort":
                self._publish(sequence)
                computed = sequence.token_array(min(sequence.computed, len(sequence.tokens)))
                self.cache.hold(sequence.request.session, computed, sequence.request.namespace)
            self._release(sequence)
        del self._live[sequence.uid]

    def _count(self, sequence: Sequence, how: Finish | Fault) -> None:
        c = self.counters
        c.jump_forward_tokens += sequence.jumped
        kind = how.kind if isinstance(how, Finish) else "abort"
        if kind == "stop":
            c.finished_stop += 1
        elif kind == "length":
            c.finished_length += 1
        else:
            c.finished_abort += 1

    def _release(self, sequence: Sequence) -> None:
        """Publish what is computed, then give back row and pages."""
        lease = sequence.lease
        assert lease is not None
        self._publish(sequence)
        self.cache.close(lease)
        self._planner.released(sequence.row)
        self._rows.give(sequence.row)
        sequence.lease = None
        sequence.row = -1

    def _publish(self, sequence: Sequence) -> None:
        """Put what is computed into the tree. The row is not used again, so its page table need not follow."""
        lease = sequence.lease
        assert lease is not None
        upto = min(sequence.computed, len(sequence.tokens))
        if upto - lease.published >= self.cache.page_size:
            self.cache.publish(lease, sequence.token_array(upto), upto)

    # ---- steps

    def plan(self, now: float) -> Plan | None:
        """The next step, or None: nothing to do, or somebody must be paused and steps in flight have to be settled
        first.
        """
        if now >= self._look_at_deadlines:
            self._end_overdue(now)
            self._look_at_deadlines = now + DEADLINE_INTERVAL
        if self._steering is not None:
            self._take_guides(self._steering, now)
        if self.settings.preemption is not None and self.waiting and not self._make_way(self.settings.preemption):
            return None
        while True:
            before = len(self.running)
            try:
                planned = self._planner.plan(self.running, self.waiting, now)
                break
            except OutOfPages:
                if self._flights:
                    return None
                self._pause(self._victim(self.running))
        for sequence in self.running[before:]:
            self._count_entry(sequence, now)
        if planned is None:
            return None
        plan, sequences = planned
        self._estimate.step()
        self.counters.steps += 1
        self._flights.append(_Flight(plan, sequences))
        return plan

    def commit(self, plan: Plan, outcome: Outcome, now: float) -> None:
        """Take the outcome of the oldest step in flight."""
        flight = self._flights.popleft()
        assert flight.plan is plan, "steps are committed in the order they were planned"
        messages, generated = self._committer.commit(plan, flight.sequences, outcome, now)
        self._outbox.extend(messages)
        self.counters.generation_tokens += generated

    def masks(self, plan: Plan, now: float) -> dict[int, Ints]:
        """Ids allowed for the samples of the newest plan, by span; spans that are not named may sample anything.

        To be asked for when every step before it is settled (see `Plan.wants_history`).
        """
        flight = self._flights[-1]
        assert flight.plan is plan
        masks: dict[int, Ints] = {}
        for i, s in enumerate(flight.sequences):
            if s.guide is None or s.finish is not None or s.foretold or not plan.samples[i]:
                continue
            try:
                words = s.guide.mask()
            except RadixError as error:
                self._fail(s, fault_of(error, s), now)
            else:
                if words is not None:
                    masks[i] = words
        return masks

    def _take_guides(self, steering: Steering, now: float) -> None:
        """Sequences whose guides are ready may enter, with what is forced behind their prompts."""
        for sequence, error in steering.ready():
            self._planner.changed()
            try:
                if error is not None:
                    raise error
                if sequence.request.logprobs is not None or sequence.limit <= sequence.prompt_len:
                    continue  # its prompt has to be computed, whatever comes behind it
                said = steering.advance(sequence)
            except RadixError as refusal:
                self._fail(sequence, fault_of(refusal, sequence), now)
                continue
            if sequence.finish is None:
                sequence.unsaid = len(said)
                continue
            # All of the text was forced: there is nothing to compute.
            sequence.started = sequence.first_token = now
            uids, ids = np.full(len(said), sequence.uid, np.int64), np.array(said, np.int32)
            extra = Extra(sequence.uid, None, None, sequence.finish, sequence.stats(now))
            self._outbox.append(Tokens(uids.tobytes(), ids.tobytes(), [extra]))
            self.counters.generation_tokens += len(said)
            self._ended(sequence, sequence.finish, now)

    def _count_entry(self, sequence: Sequence, now: float) -> None:
        if sequence.retractions == 0:
            self._waits.entered(now)
            self.counters.prompt_tokens += sequence.prompt_len
            self.counters.cached_tokens += sequence.cached_tokens

    def _end_overdue(self, now: float) -> None:
        s = self.settings
        for sequence in [*self.waiting, *self.running]:
            if sequence.finish is not None:
                continue
            age = now - sequence.request.arrival
            deadline = sequence.request.deadline
            if s.queue_timeout and sequence.row < 0 and sequence.started == 0.0 and age > s.queue_timeout:
                message = f"waited {age:.1f} s without starting; the limit is {s.queue_timeout:g} s"
                self._fail(sequence, Fault(504, "timeout", message), now)
            elif (s.request_timeout and age > s.request_timeout) or (deadline and now > deadline):
                message = f"not done after {age:.1f} s, which is over its limit"
                self._fail(sequence, Fault(504, "timeout", message), now)

    # ---- pausing

    def _victim(self, among: list[Sequence]) -> Sequence:
        """Whose pause costs least: low priority first, then few generated tokens, then the latest to arrive."""
        return min(among, key=lambda s: (s.request.priority, s.generated, -s.request.arrival, -s.uid))

    def _pause(self, sequence: Sequence) -> None:
        """Back to the waiting queue. Its published prefix stays in the tree as long as memory allows."""
        assert sequence.in_flight == 0
        self._planner.changed()
        self.running.remove(sequence)
        self._release(sequence)
        sequence.dispatched = sequence.computed = sequence.known_pages = 0
        sequence.unwritten = -1
        sequence.vector = None
        sequence.retractions += 1
        self.counters.retractions += 1
        self.waiting.add(sequence)
        self._estimate.paused(self.running)

    def _make_way(self, threshold: int) -> bool:
        """Pause running sequences for the first one waiting, if its priority is `threshold` or more above theirs and
        their pages suffice. False: steps in flight have to be settled before that."""
        first = next(iter(self.waiting))
        weaker = [
            s for s in self.running if s.finish is None and s.request.priority <= first.request.priority - threshold
        ]
        needed = len(first.tokens) + self._estimate.expected(first)
        held = sum(len(s.lease.pages) for s in weaker if s.lease is not None) * self.cache.page_size
        if not weaker or held + self.cache.headroom() < needed:
            return True
        while weaker and (not len(self._rows) or self.cache.headroom() < needed):
            if self._flights:
                return False
            victim = self._victim(weaker)
            weaker.remove(victim)
            self._pause(victim)
        return True
