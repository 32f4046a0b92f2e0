"""This module owns the radix tree: runs of tokens that are cached, the pages that hold them, and which of them may go.

The tree is a compressed trie (D. R. Morrison, "PATRICIA", J. ACM 15(4), 1968) whose letters are pages of `page_size`
tokens; that it holds the KV cache of every request, shared and evicted by prefix, is the idea of L. Zheng et al.,
"SGLang: Efficient Execution of Structured Language Model Programs", NeurIPS 2024. Nothing recurses: trees may be deep.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from radixlm.base.plan import NO_INTS, Ints
from radixlm.cache.eviction import EvictionQueue, Policy
from radixlm.cache.node import Key, Node, common_pages, cut, first_page


class NodeView(NamedTuple):
    """One node for people to look at.

    Attributes:
        parent: id of the parent, -1 for the first run of a namespace.
        pins: open leases that hold it.
        hits: closed leases that held it.
        age: ticks since a lease took or left it; leases are taken, extended and left once a tick.
    """

    id: int
    parent: int
    namespace: str
    tokens: int
    pins: int
    hits: int
    age: int


class RadixTree:
    """Prefixes by namespace. Token arguments are int32 arrays, positions in them multiples of `page_size`.

    Attributes:
        roots: namespace -> its root, which holds no tokens. Present while a lease or a child needs it.
        pinned, evictable: pages in nodes with and without leases.
        clock: ticks once per pin and unpin. Recency is counted, not measured, so that replays agree.
    """

    def __init__(self, page_size: int, policy: Policy) -> None:
        self.page_size = page_size
        self.roots: dict[str, Node] = {}
        self.queue = EvictionQueue(policy)
        self.pinned = 0
        self.evictable = 0
        self.clock = 0
        self._last_id = 0

    def follow(self, tokens: Ints, namespace: str) -> tuple[list[Node], int]:
        """The nodes that leading tokens are in, and how many tokens. The last node may hold more. Changes nothing."""
        node = self.roots.get(namespace)
        size, start = self.page_size, 0
        stop = len(tokens) - len(tokens) % size
        nodes: list[Node] = []
        while node is not None and start < stop:
            node = node.children.get(first_page(tokens, start, size))
            if node is not None:
                nodes.append(node)
                same = common_pages(node.tokens, tokens, start, stop, size)
                start += same * size
                if same < len(node.pages):
                    break
        return nodes, start

    def root(self, namespace: str) -> Node:
        """The namespace's root, made if need be. One that is never pinned would stay for good."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = self._node(namespace, None, NO_INTS, NO_INTS, 0)
        return root

    def descend(self, node: Node, tokens: Ints, start: int, stop: int) -> tuple[Node, int, list[Ints]]:
        """Follow `tokens[start:stop]` from `node` as far as they are here, and split the run in which they leave it.

        Returns:
            The node reached, the position reached, and the pages of `[start, position)`.
        """
        size = self.page_size
        pages: list[Ints] = []
        while start < stop:
            child = node.children.get(first_page(tokens, start, size))
            if child is None:
                break
            same = common_pages(child.tokens, tokens, start, stop, size)
            node = child if same == len(child.pages) else self._split(child, same)
            pages.append(node.pages)
            start += same * size
        return node, start, pages

    def add(self, parent: Node, tokens: Ints, pages: Ints, priority: int) -> Node:
        """Hang a run under `parent`, which has no child that begins like it. To be pinned next. Keeps both arrays."""
        key = first_page(tokens, 0, self.page_size)
        node = parent.children[key] = self._node(key, parent, tokens, pages, priority)
        self.evictable += len(pages)
        return node

    def pin(self, node: Node, above: Node | None, priority: int) -> None:
        """Hold the path from `node` up to `above`, that one excluded (None: up to the root, included)."""
        self.clock += 1
        step: Node | None = node
        while step is not above:
            assert step is not None, "`above` is not on the path to the root"
            if step.refs == 0:
                self.queue.withdraw(step)
                self.evictable -= len(step.pages)
                self.pinned += len(step.pages)
            step.refs += 1
            step.last = self.clock
            if step.priority < priority:
                step.priority = priority
            step = step.parent

    def unpin(self, node: Node, hit: bool) -> None:
        """Let go of the path from `node` to the root, counting a hit on it or not."""
        self.clock += 1
        step: Node | None = node
        while step is not None:
            step.refs -= 1
            step.last = self.clock
            step.hits += hit
            if step.refs == 0:
                self.pinned -= len(step.pages)
                self.evictable += len(step.pages)
            step = step.parent
        self._offer(node)

    def evict(self, count: int) -> list[Ints]:
        """Give up `count` pages, or all that no lease holds, in the order of the policy.

        A run is shortened from its end when only a part of it is needed: what is left is a prefix someone may ask for.

        Returns:
            The pages given up, one array per run that was shortened or removed.
        """
        gone: list[Ints] = []
        while count > 0 and (node := self.queue.first()) is not None:
            keep = max(0, len(node.pages) - count)
            gone.append(node.pages[keep:])
            count -= len(node.pages) - keep
            self.evictable -= len(node.pages) - keep
            if keep:
                node.tokens = cut(node.tokens, 0, keep * self.page_size)
                node.pages = cut(node.pages, 0, keep)
            else:
                self._remove(node)
        return gone

    def walk(self) -> Iterator[tuple[str, Node]]:
        """Every node but the roots, with its namespace, parents before children. The tree must not change meanwhile."""
        for namespace, root in self.roots.items():
            rest = list(root.children.values())
            while rest:
                node = rest.pop()
                yield namespace, node
                rest.extend(node.children.values())

    def nodes(self) -> Iterator[NodeView]:
        """A picture of the tree, parents before children. O(nodes)."""
        for namespace, node in self.walk():
            parent = node.parent
            above = parent.id if parent is not None and parent.parent is not None else -1
            yield NodeView(node.id, above, namespace, len(node.tokens), node.refs, node.hits, self.clock - node.last)

    def _node(self, key: Key, parent: Node | None, tokens: Ints, pages: Ints, priority: int) -> Node:
        self._last_id += 1
        return Node(self._last_id, key, parent, tokens, pages, self.clock, priority)

    def _split(self, node: Node, count: int) -> Node:
        """Cut a run after `count` pages. The lower part stays the same node, so leases that end there still do."""
        size, parent = self.page_size, node.parent
        assert parent is not None, "a root holds no tokens to split"
        upper = self._node(
            node.key, parent, cut(node.tokens, 0, count * size), cut(node.pages, 0, count), node.priority
        )
        upper.refs, upper.hits, upper.created, upper.last = node.refs, node.hits, node.created, node.last
        parent.children[upper.key] = upper
        node.parent = upper
        node.tokens = cut(node.tokens, count * size, len(node.tokens))
        node.pages = cut(node.pages, count, len(node.pages))
        key = node.key = first_page(node.tokens, 0, size)
        upper.children[key] = node
        return upper

    def _offer(self, node: Node) -> None:
        """Queue a node that may have become an evictable leaf; drop a root that nobody needs."""
        if node.refs or node.children:
            return
        if node.parent is None:
            del self.roots[str(node.key)]
        else:
            self.queue.push(node)

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None, "a root is not in the queue"
        self.queue.withdraw(node)
        del parent.children[node.key]
        node.parent = None
        # A withdrawn entry of the queue may keep the node itself alive for a while; its arrays need not be.
        node.tokens = node.pages = NO_INTS
        self._offer(parent)
