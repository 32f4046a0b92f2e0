"""This module owns tracing: a program is called with placeholders, and what it appends becomes a graph."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from radixlm.lang.backends.base import Backend
from radixlm.lang.errors import ProgramError, TraceError, at_line, caller
from radixlm.lang.graph import Fork, Graph, Join, SetVar, holes
from radixlm.lang.group import ForkGroup
from radixlm.lang.ir import Argument, Expr, Gen, Reasoning, RoleBegin, RoleEnd, ScopeBegin, Select, Text, Variable
from radixlm.lang.prompt import Prompt
from radixlm.lang.state import names_of
from radixlm.lang.writer import Standing, Writer

if TYPE_CHECKING:
    from radixlm.lang.program import Function


class _Enough(BaseException):
    """The constant prefix has ended, and nothing else was asked for."""


class Tracer:
    """What the states of one traced program have in common."""

    def __init__(self, title: str, backend: Backend | None, *, prefix_only: bool) -> None:
        self.graph = Graph(title)
        self.backend = backend
        self.streams = 1
        self._prefix_only = prefix_only

    def add(self, stream: int, op: Expr, waits: tuple[int, ...], where: str) -> int:
        if self._prefix_only and not isinstance(op, Text | RoleBegin | RoleEnd):
            raise _Enough
        return self.graph.add(stream, op, waits, where)


class TracedState(Writer):
    """The `s` of a program that is traced. Its variables are placeholders.

    Args:
        last: the node that it goes on from.
        variables: name -> number of the node that fills it, and the state it belongs to.
    """

    def __init__(
        self,
        tracer: Tracer,
        stream: int,
        last: tuple[int, ...] = (),
        variables: Mapping[str, tuple[int, int]] | None = None,
        standing: Standing | None = None,
    ) -> None:
        self._tracer = tracer
        self.stream = stream
        self.last = last
        self.variables = dict(variables or {})
        self._inherited = dict(self.variables)
        self.standing = standing or Standing()
        self._closed = ""

    def submit(self, node: Expr, where: str) -> None:
        if self._closed:
            raise ProgramError(f"the state cannot be extended any more: {self._closed}", where)
        try:
            self.standing.take(node)
            if self._tracer.backend is not None:
                self._tracer.backend.check(node, chat=self.standing.chat)
        except Exception as error:
            raise at_line(error, where) from error
        waits = self.last
        if isinstance(node, Variable):
            waits = (*waits, node.node)
        number = self._add(node, waits, where)
        for name in _filled(node):
            self.variables[name] = (number, self.stream)

    def _add(self, op: Expr, waits: tuple[int, ...], where: str) -> int:
        number = self._tracer.add(self.stream, op, tuple(dict.fromkeys(waits)), where)
        self.last = (number,)
        return number

    # ---- reading

    def get_var(self, name: str) -> Variable:
        if name not in self.variables:
            known = f"there are {', '.join(self.variables)}" if self.variables else "there are none yet"
            raise ProgramError(f"there is no variable {name!r}; {known}", caller())
        node, stream = self.variables[name]
        return Variable(f"the variable {name!r}", name, stream, node)

    def __getitem__(self, name: str) -> Variable:
        return self.get_var(name)

    def __contains__(self, name: object) -> bool:
        return name in self.variables

    def set_var(self, name: str, value: Any) -> None:
        waits = tuple(hole.node for hole in holes(value) if isinstance(hole, Variable))
        self.variables[name] = (self._add(SetVar(name, value), (*self.last, *waits), caller()), self.stream)

    __setitem__ = set_var

    def sync(self) -> None:
        """Nothing to wait for."""

    def error(self) -> None:
        """Nothing has failed."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise TraceError(f"s.{name} needs what a run makes, which is not known while tracing", caller())

    # ---- branches

    def fork(self, number: int = 1, position_ids_offset: Sequence[int] | None = None) -> ForkGroup[TracedState]:
        where = caller()
        if position_ids_offset is not None:
            raise ProgramError("position_ids_offset is not supported: positions are those of the text", where)
        if number < 1:
            raise ProgramError(f"a fork into {number} states; it takes at least 1", where)
        return ForkGroup(self, self._branch(number, where))

    def copy(self) -> TracedState:
        return self._branch(1, caller())[0]

    def _branch(self, number: int, where: str) -> list[TracedState]:
        tracer = self._tracer
        streams = tuple(range(tracer.streams, tracer.streams + number))
        tracer.streams += number
        node = self._add(Fork(streams), self.last, where)
        return [TracedState(tracer, one, (node,), self.variables, self.standing.copy()) for one in streams]

    def gather(self, states: Sequence[TracedState], *, append: bool, where: str) -> None:
        self.standing.join([state.standing for state in states], append=append)
        waits = (*self.last, *(number for state in states for number in state.last))
        node = self._add(Join(tuple(state.stream for state in states), append), waits, where)
        if not append:
            for state in states:
                for name, source in state.variables.items():
                    if state._inherited.get(name) != source:
                        self.variables[name] = (node, self.stream)

    def close(self, why: str = "the program has ended") -> None:
        self._closed = self._closed or why

    def __enter__(self) -> TracedState:
        return self

    def __exit__(self, *_: object) -> None:
        self.close("its context has ended")


def _filled(node: Expr) -> list[str]:
    """The variables that a node fills."""
    if isinstance(node, Reasoning):
        return [name for item in node.items for name in names_of(item)]
    return [node.name] if isinstance(node, Gen | Select | ScopeBegin) and node.name else []


def trace(function: Function, arguments: Mapping[str, Any], backend: Backend | None) -> Graph:
    """The graph of a program (see `Function.trace`)."""
    tracer = Tracer(function.func.__name__, backend, prefix_only=False)
    state = TracedState(tracer, 0)
    tracer.graph.result = function.func(state, **_placeholders(function, arguments))
    return tracer.graph


def shared_prefix(function: Function, arguments: Mapping[str, Any]) -> Prompt | None:
    """The text that every run with these arguments begins with.

    The program is called up to the first thing that is not constant text. None where even that fails.
    """
    tracer = Tracer(function.func.__name__, None, prefix_only=True)
    with contextlib.suppress(_Enough, Exception):  # what is wrong with the program, its runs will tell
        function.func(TracedState(tracer, 0), **_placeholders(function, arguments))
    return tracer.graph.prefix() if tracer.graph.nodes else None


def _placeholders(function: Function, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """An argument for every parameter: what is given, else its default, else a placeholder."""
    given = {**function.bound, **arguments}
    unknown = [name for name in given if name not in list(function.signature.parameters)[1:]]
    if unknown:
        raise ProgramError(f"{function.func.__name__} has no parameter {unknown[0]!r}", caller())
    found = {}
    for name, parameter in list(function.signature.parameters.items())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name in given:
            found[name] = given[name]
        elif parameter.default is parameter.empty:
            found[name] = Argument(f"the argument {name!r}", name)
    return found
