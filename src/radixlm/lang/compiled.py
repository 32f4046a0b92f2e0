"""This module owns the running of graphs: every node goes into its state's queue in order, and nobody waits.

The function is not called again, and no thread is held: a variable that another state reads is waited for on the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from radixlm.lang.errors import ProgramError, at_line, caller
from radixlm.lang.graph import Fork, Graph, Join, SetVar, holes
from radixlm.lang.home import backend_for, home
from radixlm.lang.interp import Do, Executor, Slot, Value
from radixlm.lang.ir import Argument, Hole, Text, Variable, flat
from radixlm.lang.params import make
from radixlm.lang.state import ProgramState

if TYPE_CHECKING:
    from radixlm.lang.program import Function


class Compiled:
    """A program that was traced once and is run from its graph."""

    def __init__(self, function: Function, graph: Graph, backend: Any = None) -> None:
        self._function = function
        self._backend = backend
        self.graph = graph
        self._needs = {hole.name for hole in self._holes() if isinstance(hole, Argument)}

    def _holes(self) -> Iterator[Hole]:
        yield from holes(self.graph.result)
        for node in self.graph.nodes:
            yield from holes(node.op.value if isinstance(node.op, SetVar) else node.op)

    def run(self, *args: Any, stream: bool = False, backend: Any = None, **kwargs: Any) -> ProgramState:
        """As `Function.run`, with the same results. The arguments are those that were placeholders."""
        from radixlm.lang.program import split

        said, own = split(kwargs)
        arguments = dict(zip((name for name in self._order() if name not in own), args, strict=False)) | own
        state = self._start(arguments, make(said), stream, backend)
        if not stream:
            state.error()
        return state

    def run_batch(
        self, batch_kwargs: Sequence[Mapping[str, Any]], *, backend: Any = None, **sampling: Any
    ) -> list[ProgramState]:
        """Run the graph once for each item, all together."""
        from radixlm.lang import batch

        chosen = backend_for(backend if backend is not None else self._backend)
        if len(batch_kwargs) > 1 and chosen.scheduling.hints:
            batch.warm(chosen, self.graph.prefix())
        states = [self._start(dict(item), make(sampling), False, backend) for item in batch_kwargs]
        for state in states:
            state.error()
        return states

    def print_graph(self) -> None:
        print(self.graph.text())

    def _order(self) -> list[str]:
        return [name for name in self._function.signature.parameters if name in self._needs]

    def _start(self, arguments: dict[str, Any], defaults: Any, stream: bool, backend: Any) -> ProgramState:
        missing = [name for name in self._order() if name not in arguments]
        extra = [name for name in arguments if name not in self._needs]
        if missing or extra:
            kind, name = ("missing", missing[0]) if missing else ("not one of the graph's", extra[0])
            raise ProgramError(f"the argument {name!r} of {self.graph.title} is {kind}", caller())
        chosen = backend_for(backend if backend is not None else self._backend)
        state = self._function.start(chosen, defaults, stream=stream)
        _Replay(self.graph, state, arguments).play()
        return state


class _Replay:
    """One run of a graph."""

    def __init__(self, graph: Graph, root: ProgramState, arguments: Mapping[str, Any]) -> None:
        self._graph = graph
        self._states = {0: root}
        self._arguments = arguments
        self._slots: dict[int, dict[str, Slot]] = {}  # by the node that fills them

    def play(self) -> None:
        root = self._states[0]
        try:
            for node in self._graph.nodes:
                self._step(node.number, self._states[node.stream], node.op, node.where)
        except ProgramError as error:
            home().call(root.executor.fail, error)
            home().call(root.run.cancel)
            root.close()
            root.returned.set_exception(error)
            return
        root.close()
        wanted = [self._slot(hole) for hole in holes(self._graph.result) if isinstance(hole, Variable)]
        answer: Slot = Future()
        answer.add_done_callback(partial(_pass_on, root))
        root.executor.push(Do(partial(_result, wanted, self._filled), "", (answer,)))

    def _step(self, number: int, state: ProgramState, op: Any, where: str) -> None:
        before = dict(state.slots)
        if isinstance(op, Argument):
            try:
                for item in flat(self._arguments[op.name]):
                    state.submit(item, where)
            except ProgramError as error:
                raise at_line(error, where) from None
        elif isinstance(op, Variable):
            state.standing.take(Text("x"))
            state.executor.push(Do(partial(_late, self._slot(op)), where, (Future(),)))
        elif isinstance(op, Fork):
            for stream, child in zip(op.streams, state.branch(len(op.streams), where), strict=True):
                self._states[stream] = child
        elif isinstance(op, Join):
            children = [self._states[stream] for stream in op.streams]
            state.gather(children, append=op.append, where=where)
            for child in children:
                child.close("it was joined")
        elif isinstance(op, SetVar):
            self._set(state, op, where)
        else:
            state.submit(op, where)
        self._slots[number] = {name: slot for name, slot in state.slots.items() if before.get(name) is not slot}

    def _set(self, state: ProgramState, op: SetVar, where: str) -> None:
        slot = state.declare(op.name)
        wanted = [self._slot(hole) for hole in holes(op.value) if isinstance(hole, Variable)]
        state.executor.push(
            Do(partial(_compute, wanted, partial(self._filled, op.value), slot), where, (Future(), slot))
        )

    def _slot(self, hole: Variable) -> Slot:
        return self._slots[hole.node][hole.name]

    def _filled(self, value: Any = None) -> Any:
        """A value with its placeholders filled. Their slots are full."""
        value = self._graph.result if value is None else value
        if isinstance(value, Argument):
            return self._arguments[value.name]
        if isinstance(value, Variable):
            return self._slot(value).result().value
        if isinstance(value, dict):
            return {key: self._inner(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._inner(item) for item in value)
        return value

    def _inner(self, value: Any) -> Any:
        return None if value is None else self._filled(value)


async def _ready(slots: Sequence[Slot]) -> None:
    for slot in slots:
        await asyncio.wrap_future(slot)


async def _late(slot: Slot, executor: Executor) -> None:
    value = (await asyncio.wrap_future(slot)).value
    executor.append("".join(map(str, value)) if isinstance(value, list) else str(value))


async def _compute(slots: Sequence[Slot], work: Any, target: Slot, executor: Executor) -> None:
    await _ready(slots)
    executor.fill(target, "", Value(work()))


async def _result(slots: Sequence[Slot], filled: Any, executor: Executor) -> Any:
    await _ready(slots)
    return filled()


def _pass_on(root: ProgramState, answer: Slot) -> None:
    """What the program returned, or why there is nothing."""
    if (error := answer.exception()) is not None:
        root.returned.set_exception(error)
    else:
        root.returned.set_result(answer.result().value)
