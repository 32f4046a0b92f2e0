"""This module owns the invariants of the cache: `audit` recounts everything and raises on the first that is broken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import numpy as np

from radixlm.base.plan import Ints
from radixlm.cache.node import Node, first_page
from radixlm.cache.pages import FreePages
from radixlm.cache.ports import Lease
from radixlm.cache.radix import RadixTree


def audit(free: FreePages, leases: Collection[Lease], page_size: int, tree: RadixTree | None = None) -> None:
    """Raise `AssertionError` naming what is wrong, unless:

    - every page has exactly one owner: the free list, one node, or one open lease beyond its published part;
    - the path to a lease's node holds the lease's published pages, and a node's references are the leases below it;
    - runs are whole pages, filed under their first page, below a parent with no fewer references and no lower priority;
    - the pages counted as pinned and as evictable are so, and the eviction queue holds the unpinned leaves.

    O(pages + nodes + the lengths of the leases' paths).
    """
    owned = [free.listed()]
    refs: Counter[Node] = Counter()
    for lease in leases:
        _require(not lease.closed, "a closed lease is listed as open")
        _require(lease.published % page_size == 0, "a lease has published {} tokens: not whole pages", lease.published)
        kept = lease.published // page_size
        _require(kept <= len(lease.pages), "a lease has published {} pages of {}", kept, len(lease.pages))
        owned.append(np.array(lease.pages[kept:], np.int32))
        if tree is not None:
            _check_path(lease, tree, refs)
    if tree is not None:
        owned.extend(_check_nodes(tree, refs, page_size))
    owners = np.bincount(np.concatenate(owned), minlength=free.total)
    _require(len(owners) == free.total, "page {} does not exist", len(owners) - 1)
    wrong = int((owners != 1).argmax())
    _require(owners[wrong] == 1, "page {} has {} owners", wrong, owners[wrong])


def _check_path(lease: Lease, tree: RadixTree, refs: Counter[Node]) -> None:
    """Compare a lease with its path, and count it on each node of that path."""
    runs: list[Ints] = []
    node = lease.node
    while node.parent is not None:
        refs[node] += 1
        runs.append(node.pages)
        _require(node.priority >= lease.priority, "node {} has a lower priority than its lease", node.id)
        node = node.parent
    refs[node] += 1
    _require(tree.roots.get(lease.namespace) is node, "a lease of namespace {!r} is pinned elsewhere", lease.namespace)
    path = [page for run in reversed(runs) for page in run.tolist()]
    published = lease.pages[: lease.published // tree.page_size]
    _require(path == published, "a lease has published pages {}, its path holds {}", published, path)


def _check_nodes(tree: RadixTree, refs: Counter[Node], page_size: int) -> list[Ints]:
    """Check every node, the counters and the queue; returns the pages of each node."""
    pages: list[Ints] = []
    leaves: set[Node] = set()
    pinned = evictable = 0
    for namespace, root in tree.roots.items():
        _require(root.key == namespace, "the root of {!r} says {!r}", namespace, root.key)
        _require(root.refs == refs[root], "the root of {!r} has {} references of {}", namespace, root.refs, refs[root])
        _require(bool(root.refs or root.children), "the root of {!r} is of no use", namespace)
        _require(not len(root.pages) and not root.ticket, "the root of {!r} holds pages or is queued", namespace)
        for key, child in root.children.items():
            _require(child.parent is root and child.key == key, "node {} is filed wrongly", child.id)
    for _, node in tree.walk():
        count = len(node.pages)
        _require(count > 0 and len(node.tokens) == count * page_size, "node {} is not whole pages", node.id)
        _require(node.key == first_page(node.tokens, 0, page_size), "node {} has a key of other tokens", node.id)
        _require(
            node.refs == refs[node], "node {} has {} references, {} leases hold it", node.id, node.refs, refs[node]
        )
        for key, child in node.children.items():
            _require(child.parent is node and child.key == key, "node {} is filed wrongly", child.id)
            _require(child.priority <= node.priority, "node {} has a higher priority than its parent", child.id)
        pages.append(node.pages)
        if node.refs:
            pinned += count
        else:
            evictable += count
            if not node.children:
                leaves.add(node)
    _require(tree.pinned == pinned, "{} pages are counted as pinned, {} are", tree.pinned, pinned)
    _require(tree.evictable == evictable, "{} pages are counted as evictable, {} are", tree.evictable, evictable)
    _require(sum(refs.values()) == _total_refs(tree), "a lease holds a node that is not in the tree")
    tree.queue.check(leaves)
    return pages


def _total_refs(tree: RadixTree) -> int:
    return sum(root.refs for root in tree.roots.values()) + sum(node.refs for _, node in tree.walk())


def _require(holds: bool, message: str, *values: object) -> None:
    if not holds:
        raise AssertionError(message.format(*values))
