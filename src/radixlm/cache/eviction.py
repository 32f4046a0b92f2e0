"""This module owns the order of eviction: the policies by name, and the queue of nodes that may go.

A policy is a key function; the smallest key goes first. Only unpinned leaves are compared: a prefix never goes before
what was built on it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from types import MappingProxyType

from radixlm.base.errors import StartupError
from radixlm.cache.node import Node

Policy = Callable[[Node], tuple[int, ...]]


def lru(node: Node) -> tuple[int, ...]:
    """Least recently used first."""
    return (node.last,)


def lfu(node: Node) -> tuple[int, ...]:
    """Least often used first; of equals, the least recently used."""
    return node.hits, node.last


def fifo(node: Node) -> tuple[int, ...]:
    """Oldest first, used or not."""
    return (node.created,)


def mru(node: Node) -> tuple[int, ...]:
    """Most recently used first: for loops over more prefixes than fit, where lru loses each just before its turn."""
    return (-node.last,)


def slru(node: Node) -> tuple[int, ...]:
    """Segmented lru: what was used once goes before what was used again, each least recently used first.

    A burst of prompts that nobody repeats cannot wash out the ones that are shared.
    """
    return int(node.hits > 1), node.last


def priority(node: Node) -> tuple[int, ...]:
    """Lowest priority first; of equals, the least recently used."""
    return node.priority, node.last


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {"lru": lru, "lfu": lfu, "fifo": fifo, "mru": mru, "slru": slru, "priority": priority}
)


def policy_named(name: str) -> Policy:
    """Raises `StartupError` for a name that is not in `POLICIES`."""
    if name not in POLICIES:
        raise StartupError(f"there is no eviction policy {name!r}; choose one of {', '.join(POLICIES)}")
    return POLICIES[name]


class EvictionQueue:
    """A heap of evictable leaves that is kept up to date, not rebuilt: O(log n) per node that enters or goes.

    An entry is withdrawn by forgetting its ticket; it stays in the heap until it surfaces. Once such entries outnumber
    the valid ones the heap is swept: it never holds more than twice the leaves and a constant. A node's key does not
    change while it is queued, because only leases change what policies look at, and a node under a lease is not queued.
    """

    __slots__ = ("_heap", "_last_ticket", "_policy", "count")

    #: Withdrawn entries that are not worth a sweep.
    SLACK = 64

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap: list[tuple[tuple[int, ...], int, Node]] = []
        self._last_ticket = 0
        self.count = 0

    def push(self, node: Node) -> None:
        """Queue a node that is not queued."""
        self._last_ticket += 1
        node.ticket = self._last_ticket
        self.count += 1
        heapq.heappush(self._heap, (self._policy(node), node.ticket, node))
        self._sweep()

    def withdraw(self, node: Node) -> None:
        """Take a node out, if it is queued. O(1), a sweep now and then aside."""
        if node.ticket:
            node.ticket = 0
            self.count -= 1
            self._sweep()

    def first(self) -> Node | None:
        """The node that should go next; it stays queued. None when nothing may go."""
        heap = self._heap
        while heap:
            _, ticket, node = heap[0]
            if node.ticket == ticket:
                return node
            heapq.heappop(heap)
        return None

    def check(self, leaves: set[Node]) -> None:
        """Raise `AssertionError` unless exactly these nodes are queued, under their present keys. O(entries)."""
        valid = [(key, node) for key, ticket, node in self._heap if node.ticket == ticket]
        if len(valid) != self.count or {node for _, node in valid} != leaves or len(leaves) != self.count:
            raise AssertionError(
                f"{len(valid)} nodes are queued, {self.count} counted, {len(leaves)} are evictable leaves"
            )
        for key, node in valid:
            if key != self._policy(node):
                raise AssertionError(f"node {node.id} is queued under {key}, its key is {self._policy(node)}")
        if len(self._heap) > 2 * self.count + self.SLACK:
            raise AssertionError(f"the eviction heap holds {len(self._heap)} entries for {self.count} nodes")

    def _sweep(self) -> None:
        if len(self._heap) > 2 * self.count + self.SLACK:
            self._heap = [entry for entry in self._heap if entry[2].ticket == entry[1]]
            heapq.heapify(self._heap)
