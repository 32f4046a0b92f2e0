"""This module owns the executors: one for each state, a queue of nodes that a coroutine works off on the loop.

A state costs no thread. Appending puts a node into the queue and returns; reading a variable waits for its slot. What
fails ends its state: the rest of the queue and every slot that is still empty get the error, with the line of the
program that the failing node came from.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from radixlm.lang import choices
from radixlm.lang.backends.base import Answer, Backend
from radixlm.lang.errors import ProgramError, at_line
from radixlm.lang.home import Home
from radixlm.lang.ir import (
    Expr,
    Gen,
    Image,
    Reasoning,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    Select,
    Text,
)
from radixlm.lang.params import RUN, Params
from radixlm.lang.prompt import Content, Message
from radixlm.lang.reasoning import split
from radixlm.lang.speculation import Ahead
from radixlm.lang.tape import Piece, Tape

#: A prefix with less new text than this is not worth a call of its own: computing it again costs less.
WORTH_A_HINT = 64


@dataclass(frozen=True, slots=True)
class Value:
    """What a variable holds."""

    value: Any
    meta: dict[str, Any] = field(default_factory=dict)


#: Where a variable will be.
Slot = Future[Value]


@dataclass(slots=True, eq=False)
class Run:
    """One run of a program: what its states have in common.

    Attributes:
        number: of the run, for the backend's fairness.
        spec_tokens: length of a completion made ahead for several `gen` (0: each has its own call).
    """

    home: Home
    backend: Backend
    defaults: Params
    stream: bool = False
    spec_tokens: int = 0
    number: int = 0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.number = next(self.home.numbers)

    def cancel(self) -> None:
        """End every state of the run. Call it on the loop."""
        for task in tuple(self.tasks):
            task.cancel()


@dataclass(frozen=True, slots=True)
class Do:
    """A node to execute.

    Attributes:
        slots: of the variables that it fills.
        where: the line of the program.
    """

    node: Expr | Callable[[Executor], Awaitable[Any]]
    where: str = ""
    slots: tuple[Slot, ...] = ()


class Executor:
    """Works off the queue of one state.

    Args:
        held: do nothing yet: the content comes from a state that hands it over (`branch`).
    """

    __slots__ = (
        "_ahead", "_base", "_fresh", "_held", "_new", "_queue", "_said", "_scopes", "_task", "content", "error", "run",
        "tape",
    )  # fmt: skip

    def __init__(self, run: Run, *, held: bool = False) -> None:
        self.run = run
        self.content = Content()
        self.error: ProgramError | None = None
        self.tape = Tape() if run.stream else None
        self._queue: deque[Do] = deque()
        self._task: asyncio.Task[None] | None = None
        self._held = held
        self._fresh = 0  # characters appended since the last call that computed the prompt
        self._scopes: dict[str, tuple[list[str], Slot]] = {}
        self._ahead = Ahead(run.spec_tokens) if run.spec_tokens else None
        self._new: list[str] = []  # texts appended to what was adopted
        self._base = 0  # messages that were adopted
        self._said = ""  # of a streamed chat: its text as far as it is on the tape

    # ---- any thread

    def push(self, do: Do) -> None:
        """Put something into the queue. A text alone wakes nobody: it is of use to what comes after it."""
        self._queue.append(do)
        if type(do.node) is not Text or self.tape is not None:
            self.run.home.soon(self._wake)

    def ask(self, question: Callable[[Executor], Awaitable[Any]], where: str = "") -> Future[Value]:
        """The answer to a question, asked when all that is queued is done."""
        slot: Slot = Future()
        self.push(Do(question, where, (slot,)))
        return slot

    def branch(self, children: Sequence[Executor], where: str) -> None:
        """Hand what is said here to others, which wait for it, when all that is queued is done."""

        async def hand_over(parent: Executor) -> None:
            if len(children) > 1:
                await parent.commit()
            for child in children:
                child._adopt(parent)

        def refuse(done: Slot) -> None:
            if (error := done.exception()) is not None:
                for child in children:
                    child.fail(at_line(error, where))

        slot = Slot()
        slot.add_done_callback(refuse)
        self.push(Do(hand_over, where, (slot,)))

    def end(self) -> None:
        """Nothing more will be pushed: the tape ends when all that is queued is done."""
        if self.tape is not None:
            self.push(Do(_end))

    # ---- the loop

    def _adopt(self, parent: Executor) -> None:
        """Begin with the content of another state."""
        self.content, self._fresh, self._said = parent.content.copy(), parent._fresh, parent._said
        self._base = len(self.content.messages)
        self._held = False
        self._wake()

    def take_over(self, child: Executor) -> None:
        """Append what a state of a fork said since."""
        if len(child.content.messages) > child._base:
            self.content.messages += child.content.messages[child._base :]
        else:
            self.append("".join(child._new))

    def fail(self, error: ProgramError) -> None:
        """End with an error: what is queued and what will be gets it."""
        if self.error is None:
            self.error = error
        for _, slot in self._scopes.values():
            _refuse(slot, self.error)
        self._held = False
        if self.tape is not None:
            self.tape.say(self.error)
        self._wake()

    def _wake(self) -> None:
        if self._task is None and self._queue and not self._held:
            self._task = self.run.home.loop.create_task(self._work())
            self.run.tasks.add(self._task)
            self._task.add_done_callback(self._rest)

    def _rest(self, task: asyncio.Task[None]) -> None:
        """The task has ended, perhaps before its first step, and perhaps with something new in the queue."""
        self.run.tasks.discard(task)
        self._task = None
        if task.cancelled():
            self.fail(ProgramError("the program ended before this was done"))
        self._wake()

    async def _work(self) -> None:
        while self._queue:
            do = self._queue.popleft()
            if self.error is None:
                try:
                    await self._do(do)
                except asyncio.CancelledError:
                    self.fail(ProgramError("the program ended before this was done", do.where))
                except Exception as error:
                    self.fail(at_line(error, do.where))
            if self.error is not None:
                for slot in do.slots:
                    _refuse(slot, self.error)

    async def _do(self, do: Do) -> None:
        node = do.node
        if isinstance(node, Text):
            self.append(node.text)
        elif isinstance(node, Gen):
            await self._generate(node, do.slots)
        elif isinstance(node, Select):
            await self._select(node, do.slots)
        elif isinstance(node, RoleBegin):
            self.content.begin(node.role)
            await self.catch_up()
        elif isinstance(node, RoleEnd):
            if self._ahead is not None:
                self._ahead.drop()
            self.content.end()
            await self.catch_up()
        elif isinstance(node, ScopeBegin):
            self._scopes[node.name] = ([], do.slots[0])
        elif isinstance(node, ScopeEnd):
            texts, slot = self._scopes.pop(node.name)
            self.fill(slot, node.name, Value("".join(texts)))
        elif isinstance(node, Image):
            self.content.append(node)
        elif isinstance(node, Reasoning):
            await self._reason(node, do.slots)
        elif not isinstance(node, Expr):
            value = await node(self)
            if do.slots and not do.slots[0].done():
                do.slots[0].set_result(Value(value))

    # ---- text

    def append(self, text: str, name: str = "") -> None:
        """Constant text. What was generated ahead has to agree with it, or is of no use any more."""
        if self._ahead is not None and not name:
            self._ahead.meet(text)
        self._grow(text)
        if self.tape is not None and text:
            self.tape.say(Piece(name, text))

    def _grow(self, text: str) -> None:
        self.content.append(text)
        self._new.append(text)
        self._fresh += len(text)
        if self.content.role:
            self._said += text
        for texts, _ in self._scopes.values():
            texts.append(text)

    async def catch_up(self) -> None:
        """Put what the chat template writes around a message on the tape."""
        self._fresh += 1
        if self.tape is None:
            return
        text = await self.run.backend.text(self.content.prompt(self.run.number))
        if text.startswith(self._said) and len(text) > len(self._said):
            self.tape.say(Piece("", text[len(self._said) :]))
        self._said = text

    # ---- calls

    async def commit(self) -> None:
        """The hint: have all that was said in the cache, if much of it is new."""
        if self.run.backend.scheduling.hints and self._fresh >= WORTH_A_HINT:
            prompt = self.content.prompt(self.run.number)
            async with self.run.backend.gate.turn(self.run.number):
                await self.run.backend.prefill(prompt)
            self._fresh = 0

    async def _generate(self, node: Gen, slots: Sequence[Slot]) -> None:
        params = node.params.over(self.run.defaults).over(RUN)
        several = params.n is not None and params.n > 1
        if self._ahead is not None and not several:
            text, meta = await self._ahead.take(self, node, params)
            self._deliver(node.name, slots, text, meta)
        elif self.tape is not None and not several:
            await self._generate_streamed(node, params, slots)
        else:
            answers = await self.call(params)
            if several:
                values, metas = [a.text for a in answers], {"choices": [a.meta for a in answers]}
                self._deliver(node.name, slots, answers[0].text, metas, values)
            else:
                self._deliver(node.name, slots, answers[0].text, answers[0].meta)

    async def call(self, params: Params, *, from_start: bool = False) -> list[Answer]:
        """The continuation of what was said so far, or with `from_start` of what was said before the open message."""
        backend, number = self.run.backend, self.run.number
        prompt = self.content.prompt(number)
        if from_start and prompt.open is not None:
            prompt = replace(prompt, open=Message(prompt.open.role))
        async with backend.gate.turn(number):
            answers = await backend.generate(prompt, params)
        self._fresh = 0
        return answers

    async def _generate_streamed(self, node: Gen, params: Params, slots: Sequence[Slot]) -> None:
        assert self.tape is not None
        backend, number = self.run.backend, self.run.number
        said, meta = "", {}
        async with backend.gate.turn(number):
            async for answer in backend.stream(self.content.prompt(number), params):
                if len(answer.text) > len(said):
                    self.tape.say(Piece(node.name, answer.text[len(said) :], answer.meta))
                said, meta = answer.text, answer.meta
        self._fresh = 0
        self._grow(said)
        if slots:
            self.fill(slots[0], node.name, Value(said, meta))

    async def _select(self, node: Select, slots: Sequence[Slot]) -> None:
        backend, number = self.run.backend, self.run.number
        alone = node.method == "unconditional_likelihood_normalized"
        await self.commit()  # what the choices share: one step for it, one for all of them
        async with backend.gate.turn(number):
            scored = await backend.score(self.content.prompt(number), node.choices, alone=alone)
        self._fresh = 0
        index, meta = choices.choose(node.method, node.choices, scored)
        self._deliver(node.name, slots, node.choices[index], meta)

    async def _reason(self, node: Reasoning, slots: Sequence[Slot]) -> None:
        """Generated texts without their reasoning, which goes into the second slot of each."""
        waiting = list(slots)
        for item in node.items:
            if isinstance(item, Gen):
                answer = (await self.call(item.params.over(self.run.defaults).over(RUN)))[0]
                thought, text = split(answer.text, node.model_type)
                mine, waiting = (waiting[:2], waiting[2:]) if item.name else ([], waiting)
                self._deliver(item.name, mine[:1], text, answer.meta)
                for slot in mine[1:]:
                    slot.set_result(Value(thought))
            else:
                taken = 1 if isinstance(item, Select) and item.name else 0
                await self._do(Do(item, "", tuple(waiting[:taken])))
                waiting = waiting[taken:]

    def _deliver(self, name: str, slots: Sequence[Slot], text: str, meta: dict[str, Any], value: Any = None) -> None:
        """Append what was generated and fill its variable."""
        self._grow(text)
        if self.tape is not None and text:
            self.tape.say(Piece(name, text, meta))
        if slots:
            self.fill(slots[0], name, Value(text if value is None else value, meta))

    def fill(self, slot: Slot, name: str, value: Value) -> None:
        """Give a variable its value."""
        slot.set_result(value)
        if self.tape is not None:
            self.tape.say(Piece(name, "", value.meta, last=True))


def _refuse(slot: Slot, error: ProgramError) -> None:
    if not slot.done():
        slot.set_exception(error)


async def _end(executor: Executor) -> None:
    assert executor.tape is not None
    executor.tape.say(None)
