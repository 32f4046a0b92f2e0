"""This module owns `ProgramState`, the `s` of a program, and `ForkGroup`, several of them.

The state is the program's side: it checks what is appended (so that a mistake raises at its own line), knows which
variables there will be, and hands nodes to its executor. The texts are the executor's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any

from radixlm.lang import reading
from radixlm.lang.errors import ProgramError, at_line, caller
from radixlm.lang.group import ForkGroup
from radixlm.lang.interp import Do, Executor, Run, Slot, Value
from radixlm.lang.ir import Expr, Gen, Reasoning, ScopeBegin, Select
from radixlm.lang.joins import append_all, gather_all
from radixlm.lang.outside import Outside
from radixlm.lang.reasoning import form
from radixlm.lang.writer import Standing, Writer

REASONING = "_reasoning_content"


class ProgramState(Writer):
    """What a program writes into and reads from. Every method may be called from any thread.

    Args:
        slots: variables that are there from the start.
        outside: who reads the state of a program that runs in a thread of its own; None: nobody reads before its end.

    Attributes:
        run, executor, slots, standing, returned: for the rest of this package; programs use the methods.
    """

    def __init__(
        self,
        run: Run,
        executor: Executor,
        slots: dict[str, Slot] | None = None,
        standing: Standing | None = None,
        outside: Outside | None = None,
    ) -> None:
        self.run = run
        self.executor = executor
        self.slots = dict(slots or {})
        self._inherited = dict(self.slots)
        self.standing = standing or Standing()
        self._outside = outside
        self._closed = ""
        self.returned: Future[Any] = Future()

    # ---- writing

    def submit(self, node: Expr, where: str) -> None:
        """Put a node into the queue."""
        if self._closed:
            raise ProgramError(f"the state cannot be extended any more: {self._closed}", where)
        try:
            self.standing.take(node)
            self.run.backend.check(node, chat=self.standing.chat)
        except Exception as error:
            raise at_line(error, where) from error
        slots: list[Slot] = []
        if isinstance(node, Reasoning):
            form(node.model_type)
            if self.run.stream:
                raise ProgramError(
                    "separate_reasoning is not for streams: what is reasoning is known at its end", where
                )
            for item in node.items:
                slots += [self.declare(name) for name in names_of(item)]
        elif isinstance(node, Gen | Select | ScopeBegin) and node.name:
            slots.append(self.declare(node.name))
        self.executor.push(Do(node, where, tuple(slots)))

    def declare(self, name: str) -> Slot:
        """A variable that will be filled; it hides an earlier one of its name."""
        slot: Slot = Future()
        if self._outside is None:
            self.slots[name] = slot
        else:
            self._outside.declare(name, slot, self.slots)
        return slot

    def set_var(self, name: str, value: Any) -> None:
        """Give a variable a value of the program's own."""
        self.declare(name).set_result(Value(value))

    __setitem__ = set_var

    # ---- reading

    def get_var(self, name: str) -> Any:
        """The value of a variable, waited for.

        Raises:
            ProgramError: there is no such variable, or what should have filled it failed (with its line).
        """
        return self._value(name, caller()).value

    def __getitem__(self, name: str) -> Any:
        return self.get_var(name)

    def __contains__(self, name: object) -> bool:
        return name in self.slots

    def get_meta_info(self, name: str) -> dict[str, Any]:
        """What the backend told with a variable: token counts, finish reason, log-probabilities."""
        return self._value(name, caller()).meta

    async def async_get_var(self, name: str) -> Any:
        """`get_var` for asyncio."""
        return (await asyncio.wrap_future(self._slot(name, caller()))).value

    def _slot(self, name: str, where: str) -> Slot:
        if self._outside is not None and (wanted := self._outside.want(name, self.slots, where)) is not None:
            return wanted
        if name not in self.slots:
            known = f"there are {', '.join(self.slots)}" if self.slots else "there are none yet"
            raise ProgramError(f"there is no variable {name!r}; {known}", where)
        return self.slots[name]

    def _value(self, name: str, where: str) -> Value:
        value = self.run.home.wait(self._slot(name, where))
        assert isinstance(value, Value)
        return value

    def text(self) -> str:
        """Everything that was said. A chat is text as the model sees it."""
        return str(self._ask(_text))

    def messages(self) -> list[dict[str, Any]]:
        """The messages of a chat, in OpenAI's form."""
        return list(self._ask(_messages))

    def sync(self) -> None:
        """Wait until all that was appended is done. Raises what failed."""
        self._ask(_nothing)

    def _ask(self, question: Callable[[Executor], Any]) -> Any:
        if self._outside is not None:
            self._outside.wait()
        return self.run.home.wait(self.executor.ask(question, caller())).value

    def error(self) -> ProgramError | None:
        """What failed, or None. Waits until all that was appended is done."""
        try:
            self.sync()
        except ProgramError as error:
            return error
        if self.returned.done() and (failure := self.returned.exception()) is not None:
            return failure if isinstance(failure, ProgramError) else at_line(failure, "")
        return None

    @property
    def ret_value(self) -> Any:
        """What the program returned, waited for. Raises what it raised."""
        return self.run.home.wait(self.returned)

    # ---- streams

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """The text piece by piece as it comes, or that of one variable. Of a run without `stream`, all in one piece."""
        for piece in reading.pieces(self, var_name):
            if piece.text:
                yield piece.text

    async def text_async_iter(self, var_name: str | None = None, return_meta_data: bool = False) -> AsyncIterator[Any]:
        """`text_iter` for asyncio. With `return_meta_data`, pairs of a piece and what the backend told with it."""
        async for piece in reading.async_pieces(self, var_name):
            if piece.text or (return_meta_data and piece.last):
                yield (piece.text, piece.meta) if return_meta_data else piece.text

    # ---- branches

    def fork(self, number: int = 1, position_ids_offset: Sequence[int] | None = None) -> ForkGroup[ProgramState]:
        """States that go on from here, each on its own. The prompt so far is computed once, before they start."""
        where = caller()
        if position_ids_offset is not None:
            raise ProgramError("position_ids_offset is not supported: positions are those of the text", where)
        if number < 1:
            raise ProgramError(f"a fork into {number} states; it takes at least 1", where)
        return ForkGroup(self, self.branch(number, where))

    def copy(self) -> ProgramState:
        """One state that goes on from here. As a context, it ends with it."""
        return self.branch(1, caller())[0]

    def branch(self, number: int, where: str) -> list[ProgramState]:
        """States that go on from here."""
        if self._closed:
            raise ProgramError(f"a finished state cannot be forked: {self._closed}", where)
        executors = [Executor(self.run, held=True) for _ in range(number)]
        self.executor.branch(executors, where)
        return [ProgramState(self.run, one, self.slots, self.standing.copy()) for one in executors]

    def gather(self, states: Sequence[ProgramState], *, append: bool, where: str) -> None:
        """Bring home what states of a fork made (see `ForkGroup.join`)."""
        if self._closed:
            raise ProgramError(f"the state cannot be extended any more: {self._closed}", where)
        executors = [state.executor for state in states]
        self.standing.join([state.standing for state in states], append=append)
        if append:
            self.executor.push(Do(partial(append_all, executors), where, (Future(),)))
            return
        made = [{name: slot for name, slot in s.slots.items() if s._inherited.get(name) is not slot} for s in states]
        names = list(dict.fromkeys(name for slots in made for name in slots))
        found = [[slots[name] for slots in made if name in slots] for name in names]
        mine = tuple(self.declare(name) for name in names)
        self.executor.push(Do(partial(gather_all, executors, names, found, mine), where, (Future(), *mine)))

    def cancel(self) -> None:
        """End the whole run: calls in flight are given up, and whatever is read afterwards raises. For streams whose
        reader has gone.
        """
        self.close("it was cancelled")
        self.run.home.call(self.executor.fail, ProgramError("the program was cancelled", caller()))
        self.run.home.call(self.run.cancel)

    def close(self, why: str = "the program has ended") -> None:
        """Nothing more will be appended; streams end when all that was is done. Reading goes on."""
        if not self._closed:
            self._closed = why
            self.executor.end()
        if self._outside is not None:
            self._outside.end()

    def __enter__(self) -> ProgramState:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close("its context has ended")


def names_of(node: Expr) -> list[str]:
    """The variables that a node within separate_reasoning fills."""
    if isinstance(node, Gen) and node.name:
        return [node.name, node.name + REASONING]
    return [node.name] if isinstance(node, Select) and node.name else []


async def _text(executor: Executor) -> str:
    return await executor.run.backend.text(executor.content.prompt(executor.run.number))


async def _messages(executor: Executor) -> list[dict[str, Any]]:
    prompt = executor.content.prompt(executor.run.number)
    return [message.plain() for message in (*prompt.messages, *((prompt.open,) if prompt.open else ()))]


async def _nothing(executor: Executor) -> None:
    return None
