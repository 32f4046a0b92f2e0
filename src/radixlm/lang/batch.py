"""This module owns the running of one program over many items: who starts when, and what is computed before."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from typing import TYPE_CHECKING, Any

from radixlm.lang.backends.base import Backend
from radixlm.lang.errors import ProgramError
from radixlm.lang.home import home
from radixlm.lang.interp import WORTH_A_HINT
from radixlm.lang.params import Params
from radixlm.lang.prompt import Prompt
from radixlm.lang.state import ProgramState

if TYPE_CHECKING:
    from radixlm.lang.program import Function

#: Threads that run functions, and runs under way, where nobody says how many.
THREADS, UNDER_WAY = 64, 1024


class Batch:
    """One call of `run_batch`."""

    def __init__(
        self,
        function: Function,
        items: Sequence[Mapping[str, Any]],
        backend: Backend,
        defaults: Params,
        num_threads: int | str,
        progress_bar: bool,
    ) -> None:
        if num_threads != "auto" and (not isinstance(num_threads, int) or num_threads < 1):
            raise ProgramError(f"num_threads is {num_threads!r}; it is at least 1, or 'auto'")
        self._function = function
        self._items = items
        self._backend = backend
        self._defaults = defaults
        self._threads, self._limit = (
            (num_threads, num_threads) if isinstance(num_threads, int) else (THREADS, UNDER_WAY)
        )
        self._bar = progress_bar

    def run(self) -> Iterator[ProgramState]:
        """Run all of them; they are given in order, each when it is done."""
        self._hint()
        free = threading.Semaphore(self._limit)
        with ExitStack() as stack:
            done = stack.enter_context(_Bar(len(self._items))).step if self._bar else _quiet
            pool = stack.enter_context(ThreadPoolExecutor(self._threads, thread_name_prefix="radixlm-batch"))
            states = []
            for item in self._items:
                free.acquire()
                states.append(self._start(pool, item, free, done))
            for state in states:
                yield _finished(state)

    def run_lazily(self) -> Iterator[ProgramState]:
        """Run them as they are asked for: no more are under way than are allowed, finished ones that nobody took yet
        included.
        """
        self._hint()
        with ExitStack() as stack:
            done = stack.enter_context(_Bar(len(self._items))).step if self._bar else _quiet
            pool = stack.enter_context(ThreadPoolExecutor(self._threads, thread_name_prefix="radixlm-batch"))
            never = threading.Semaphore(0)
            waiting = iter(self._items)
            states = [self._start(pool, item, never, done) for item in islice(waiting, self._limit)]
            while states:
                yield _finished(states.pop(0))
                states += [self._start(pool, item, never, done) for item in islice(waiting, 1)]

    def _start(
        self, pool: ThreadPoolExecutor, item: Mapping[str, Any], free: threading.Semaphore, done: Any
    ) -> ProgramState:
        state = self._function.start(self._backend, self._defaults)

        def ended(_: Any) -> None:
            free.release()
            done()

        def work() -> None:
            try:
                self._function.execute(state, item)
            finally:
                state.executor.ask(_nothing).add_done_callback(ended)

        pool.submit(work)
        return state

    def _hint(self) -> None:
        """Have what all runs begin with in the cache. A program that cannot be traced so far has no hint."""
        if len(self._items) < 2 or not self._backend.scheduling.hints:
            return
        from radixlm.lang.trace import shared_prefix

        first, *others = self._items
        same = {name: value for name, value in first.items() if all(_same(value, item[name]) for item in others)}
        warm(self._backend, shared_prefix(self._function, same))


def warm(backend: Backend, prefix: Prompt | None) -> str:
    """Compute a prefix; "" if it is not worth it. A failure is left to the runs that will meet it too."""
    if prefix is None:
        return ""
    said = prefix.text + "".join(m.text for m in (*prefix.messages, *((prefix.open,) if prefix.open else ())))
    if len(said) < WORTH_A_HINT:
        return ""

    async def work() -> str:
        async with backend.gate.turn(0):
            await backend.prefill(prefix)
            return await backend.text(prefix)

    return str(home().do(work()))


def _same(a: Any, b: Any) -> bool:
    """Whether two arguments are equal, for those that can tell."""
    try:
        return a is b or bool(a == b)
    except Exception:  # somebody's own comparison, an array's for example
        return False


def _finished(state: ProgramState) -> ProgramState:
    """Wait for a run: for its function, and for what it appended. Its failure is its own."""
    state.returned.exception()
    state.error()
    return state


async def _nothing(executor: Any) -> None:
    return None


def _quiet() -> None:
    pass


class _Bar:
    """How many of a batch are done, on standard error."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

        self._progress = Progress(
            BarColumn(bar_width=30), MofNCompleteColumn(), TimeElapsedColumn(), console=Console(stderr=True)
        )
        self._task = self._progress.add_task("runs", total=total)

    def step(self) -> None:
        self._progress.advance(self._task)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
