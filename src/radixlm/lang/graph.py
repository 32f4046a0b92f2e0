"""This module owns `Graph`: a program as nodes, each with the nodes that it waits for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from radixlm.lang.ir import Expr, Gen, Hole, Reasoning, RoleBegin, RoleEnd, Select, Text
from radixlm.lang.prompt import Content, Prompt


@dataclass(frozen=True, slots=True)
class Fork(Expr):
    """States that go on from here. `streams` are their numbers."""

    streams: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Join(Expr):
    """What states of a fork made comes home."""

    streams: tuple[int, ...]
    append: bool


@dataclass(frozen=True, slots=True)
class SetVar(Expr):
    """A variable with a value of the program's own."""

    name: str
    value: Any


@dataclass(frozen=True, slots=True)
class Node:
    """
    Attributes:
        number: its place; nodes come after all that they wait for.
        stream: the state it belongs to; 0 is the program's.
        waits: numbers of the nodes before it in its state, at its fork, and of the variables it reads.
        where: the line of the program.
    """

    number: int
    stream: int
    op: Expr
    waits: tuple[int, ...]
    where: str = ""


@dataclass(slots=True)
class Graph:
    """
    Attributes:
        title: the program's name.
        nodes: in the order in which the program made them.
        result: what the program returned; placeholders in it are filled by a run.
    """

    title: str
    nodes: list[Node] = field(default_factory=list)
    result: Any = None

    def add(self, stream: int, op: Expr, waits: tuple[int, ...], where: str) -> int:
        number = len(self.nodes)
        self.nodes.append(Node(number, stream, op, waits, where))
        return number

    @property
    def streams(self) -> int:
        return max((node.stream for node in self.nodes), default=0) + 1

    def calls(self) -> list[Node]:
        """The nodes for which the model is asked."""
        return [node for node in self.nodes if isinstance(node.op, Gen | Select | Reasoning)]

    def prefix(self) -> Prompt:
        """What every run begins with: the constant text before anything else."""
        content = Content()
        for node in self.constant():
            if isinstance(node.op, Text):
                content.append(node.op.text)
            elif isinstance(node.op, RoleBegin):
                content.begin(node.op.role)
            else:
                content.end()
        return content.prompt(0)

    def constant(self) -> Iterator[Node]:
        """The nodes of the prefix."""
        for node in self.nodes:
            if node.stream or not isinstance(node.op, Text | RoleBegin | RoleEnd):
                return
            yield node

    def sharing(self) -> dict[int, str]:
        """Node -> who shares its text: every `run`, the states of a `fork`, or `none`. A run that goes on from its own
        earlier text shares that with itself in any case.
        """
        found = {node.number: "none" for node in self.nodes}
        forks = {node.stream: node.number for node in self.nodes if isinstance(node.op, Fork)}
        for node in self.nodes:
            last = forks.get(node.stream)
            if last is not None and node.number < last and not isinstance(node.op, Fork | Join):
                found[node.number] = "fork"
        for node in self.constant():
            found[node.number] = "run"
        return found

    def text(self) -> str:
        """The graph as lines, one for each node."""
        from radixlm.lang.drawing import lines

        return lines(self)

    @property
    def svg(self) -> str:
        """The graph as a picture."""
        from radixlm.lang.drawing import svg

        return svg(self)

    __str__ = text


def holes(value: Any) -> Iterator[Hole]:
    """The placeholders in a value."""
    if isinstance(value, Hole):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from holes(item)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from holes(item)
