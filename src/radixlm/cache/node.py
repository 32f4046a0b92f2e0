"""This module owns `Node`, a run of tokens with the pages that hold it, and the comparing and cutting of such runs."""

from __future__ import annotations

from radixlm.base.plan import Ints

Key = int | bytes | str


class Node:
    """One edge of the radix tree together with the place it leads to. Only `cache.radix` changes it.

    Attributes:
        id: unique within its tree, never reused.
        key: what it is filed under in `parent.children`: its first page's tokens. Of a root: its namespace.
        parent: None for a root, and for a node that was evicted.
        tokens: [n * page_size] int32, the tokens between the parent and here.
        pages: [n] int32, where their keys and values are.
        refs: open leases whose pinned path goes through here, so never more than the parent's.
        hits: closed leases whose path went through here.
        created, last: ticks of the tree's clock: when it was made, when a lease last took or left it.
        priority: the highest of the leases that held it, so never more than the parent's.
        ticket: of its one valid entry in the eviction queue; 0 for none.
    """

    __slots__ = (
        "children", "created", "hits", "id", "key", "last", "pages", "parent", "priority", "refs", "ticket", "tokens",
    )  # fmt: skip

    def __init__(
        self,
        id: int,
        key: Key,
        parent: Node | None,
        tokens: Ints,
        pages: Ints,
        created: int,
        priority: int,
    ) -> None:
        self.id = id
        self.key = key
        self.parent = parent
        self.children: dict[Key, Node] = {}
        self.tokens = tokens
        self.pages = pages
        self.refs = 0
        self.hits = 0
        self.created = created
        self.last = created
        self.priority = priority
        self.ticket = 0


def first_page(tokens: Ints, start: int, page_size: int) -> int | bytes:
    """The dictionary key of the page of tokens that begins at `start`."""
    if page_size == 1:
        return tokens.item(start)
    return tokens[start : start + page_size].tobytes()


def common_pages(run: Ints, tokens: Ints, start: int, stop: int, page_size: int) -> int:
    """How many whole pages of `run` equal the tokens from `start` on, looking no further than `stop`."""
    length = min(len(run), stop - start)
    differs = run[:length] != tokens[start : start + length]
    first = int(differs.argmax())  # of equal runs, 0: argmax finds the first largest, and all are False
    return (first if differs[first] else length) // page_size


def cut(run: Ints, start: int, stop: int) -> Ints:
    """`run[start:stop]`, as a view unless that would keep memory of twice its size alive."""
    part = run[start:stop]
    whole = run if run.base is None else run.base
    return part.copy() if len(whole) > 2 * len(part) else part
