"""This module owns fair shares between tenants: whose waiting request goes first, and whose has to go when the queue is
full.

The order is that of the virtual token counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024):
each tenant's counter grows by the tokens it was served, divided by its weight, and the tenant with the smallest counter
goes first. A tenant that comes back starts no lower than those that are there, so that nobody saves up for later.
Nothing is ever kept idle for anybody: a tenant that is alone has the whole engine.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from radixlm.schedule.ports import Order
from radixlm.schedule.queues import WaitingQueue
from radixlm.schedule.sequence import Sequence

#: What a generated token costs, in prompt tokens that have to be computed (section 4.1 of the paper).
GENERATED_COST = 2.0


class FairShare:
    """An order around another one, which holds within each tenant, priorities included. It is in the list of gates as
    well, because it has to know who was admitted; it holds nobody back.
    """

    def __init__(self, inner: Order) -> None:
        self._inner = inner
        self._served: dict[str, float] = {}  # tenant -> cost of what it got, by weight
        self._active: set[str] = set()
        self._running: dict[int, tuple[Sequence, int]] = {}  # uid -> generated tokens that were charged

    # ---- who goes first

    def arrange(self, waiting: list[Sequence], now: float) -> list[Sequence]:
        """Paused sequences first, as they come; then the others, tenants in turn."""
        by_tenant: dict[str, list[Sequence]] = {}
        resumed: list[Sequence] = []
        for sequence in self._inner.arrange(waiting, now):
            if sequence.started:
                resumed.append(sequence)
            else:
                by_tenant.setdefault(sequence.request.tenant, []).append(sequence)
        self._welcome(by_tenant)
        if len(by_tenant) < 2:
            return resumed + next(iter(by_tenant.values()), [])
        return resumed + list(self._in_turn(by_tenant))

    def _in_turn(self, by_tenant: dict[str, list[Sequence]]) -> Iterator[Sequence]:
        """As if each were charged for its prompt when it is let in."""
        turns = [(self._served[tenant], tenant, 0) for tenant in by_tenant]
        heapq.heapify(turns)
        while turns:
            served, tenant, at = turns[0]
            sequence = by_tenant[tenant][at]
            yield sequence
            if at + 1 < len(by_tenant[tenant]):
                cost = sequence.prompt_len / sequence.request.share
                heapq.heapreplace(turns, (served + cost, tenant, at + 1))
            else:
                heapq.heappop(turns)

    def _welcome(self, waiting: Iterable[str]) -> None:
        """Tenants that were away are lifted to the least of those that were not."""
        running = {sequence.request.tenant for sequence, _ in self._running.values()}
        active = running.union(waiting)
        stayed = [self._served[tenant] for tenant in self._active & active]
        floor = min(stayed, default=max(self._served.values(), default=0.0))
        for tenant in active - self._active:
            self._served[tenant] = max(self._served.get(tenant, 0.0), floor)
        self._active = active

    # ---- what they got (`schedule.ports.Gate`)

    def begin(self, running: Iterable[Sequence]) -> None:
        """Charge what was generated since the last round; what has ended is charged for the last time."""
        for uid, (sequence, charged) in list(self._running.items()):
            if sequence.generated > charged:
                self._charge(sequence, GENERATED_COST * (sequence.generated - charged))
            if sequence.ended:
                del self._running[uid]
            else:
                self._running[uid] = sequence, sequence.generated

    def admits(self, sequence: Sequence) -> bool:
        return True

    def admitted(self, sequence: Sequence) -> None:
        """Charge the part of its prompt that has to be computed; of one that resumes, nothing: it was not its wish."""
        if sequence.uid not in self._running:
            self._running[sequence.uid] = sequence, sequence.generated
            self._charge(sequence, sequence.prompt_len - sequence.cached_tokens)

    def _charge(self, sequence: Sequence, cost: float) -> None:
        tenant = sequence.request.tenant
        self._served[tenant] = self._served.get(tenant, 0.0) + cost / sequence.request.share


def crowded_out(waiting: WaitingQueue, tenant: str, share: float) -> Sequence | None:
    """Who has to leave a full queue for a newcomer: the newest of the tenant that waits with most, by weight. None if
    that is the newcomer's own (longest queue drop: Suter et al., "Buffer Management Schemes for Supporting TCP in
    Gigabit Routers with Per-flow Queueing", IEEE JSAC 17(6), 1999).
    """
    shares = {sequence.request.tenant: sequence.request.share for sequence in waiting}
    if not shares:
        return None
    most = max(shares, key=lambda name: waiting.tenants[name] / shares[name])
    if most == tenant or waiting.tenants[most] / shares[most] <= (waiting.tenants[tenant] + 1) / share:
        return None
    for sequence in reversed(waiting.as_list()):
        if sequence.request.tenant == most and not sequence.started:
            return sequence
    return None
