"""This module owns `Function`: a program, and the ways to run it."""

from __future__ import annotations

import inspect
import linecache
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, overload

from radixlm.base.errors import NotServed
from radixlm.lang import batch
from radixlm.lang.backends.base import Backend
from radixlm.lang.errors import ProgramError, at_line, caller
from radixlm.lang.home import backend_for, home
from radixlm.lang.interp import Executor, Run
from radixlm.lang.outside import Outside
from radixlm.lang.params import Params, make
from radixlm.lang.state import ProgramState

if TYPE_CHECKING:
    from radixlm.lang.compiled import Compiled
    from radixlm.lang.graph import Graph

#: Arguments of `run` that are not of the program.
RESERVED = (*Params.__struct_fields__, "stream", "backend", "use_thread")


class Function:
    """A program: a function whose first parameter, `s`, is the state it writes into. Made by `@function`.

    Args:
        num_api_spec_tokens: on backends where every call costs its whole prompt, generate so many tokens ahead and
            serve several `gen` from them while the text agrees (`lang.speculation`).
        bound: arguments that are given already.
    """

    def __init__(
        self,
        func: Callable[..., Any],
        num_api_spec_tokens: int | None = None,
        bound: Mapping[str, Any] | None = None,
    ) -> None:
        names = list(inspect.signature(func).parameters)
        if not names or names[0] != "s":
            raise ProgramError(f"the first parameter of a program is its state, s; {func.__name__} has {names[:1]}")
        taken = [name for name in names if name in RESERVED]
        if taken:
            raise ProgramError(f"the parameter {taken[0]!r} of {func.__name__} is one of run's own; call it otherwise")
        if num_api_spec_tokens is not None and num_api_spec_tokens < 1:
            raise ProgramError(f"num_api_spec_tokens is {num_api_spec_tokens}; it must be at least 1")
        self.func = func
        self.num_api_spec_tokens = num_api_spec_tokens
        self.bound = dict(bound or {})
        self.signature = inspect.signature(func)
        update_wrapper(self, func)

    def bind(self, **arguments: Any) -> Function:
        """The program with some arguments given. They count as constant text for the prefix that all runs share."""
        unknown = [name for name in arguments if name not in list(self.signature.parameters)[1:]]
        if unknown:
            raise ProgramError(f"{self.func.__name__} has no parameter {unknown[0]!r}", caller())
        return Function(self.func, self.num_api_spec_tokens, {**self.bound, **arguments})

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """All arguments by name. Raises `ProgramError` if they do not fit."""
        try:
            given = self.signature.bind(None, *args, **{**self.bound, **kwargs})
        except TypeError as error:
            raise ProgramError(f"{self.func.__name__}: {error}", caller()) from None
        given.apply_defaults()
        found = dict(given.arguments)
        del found["s"]
        return found

    # ---- running

    def run(
        self, *args: Any, stream: bool = False, backend: Any = None, use_thread: bool = True, **kwargs: Any
    ) -> ProgramState:
        """Run the program and wait until it is done.

        Sampling parameters under their native names (`max_new_tokens` 128, `temperature` 1, ...) hold for every `gen`
        that does not say otherwise; all other arguments are the program's.

        Args:
            stream: return at once; the state is read with `text_iter` while the program runs.
            backend: an `Engine`, a server's URL, or a backend; the default one if not given.
            use_thread: run a streamed program in a thread. Without, it is run here, and its texts come meanwhile.

        Raises:
            ProgramError: the backend cannot do what the program asks, or parameters are wrong.
            Exception: what the program itself raised. What a call of the backend raised is raised where the state is
                used: by `s["name"]`, `s.text()` and the like.
        """
        said, own = split(kwargs)
        chosen, defaults, arguments = backend_for(backend), make(said), self.arguments(args, own)
        if stream and use_thread:
            outside = Outside()
            state = self.start(chosen, defaults, stream=True, outside=outside)
            home().pool.submit(self.execute, state, arguments, outside)
            return state
        state = self.start(chosen, defaults, stream=stream)
        self.execute(state, arguments)
        if stream:
            return state
        if (failure := state.returned.exception()) is not None:
            raise failure
        state.error()
        return state

    def start(
        self, backend: Backend, defaults: Params, *, stream: bool = False, outside: Outside | None = None
    ) -> ProgramState:
        """A fresh state to run the program in."""
        try:
            backend.check_params(defaults)
        except NotServed as error:
            raise at_line(error, caller()) from error
        spec = self.num_api_spec_tokens if backend.metered else None
        run = Run(home(), backend, defaults, stream, spec or 0)
        return ProgramState(run, Executor(run), outside=outside)

    def execute(self, state: ProgramState, arguments: Mapping[str, Any], outside: Outside | None = None) -> None:
        """Call the function. What it returns and raises is kept in the state."""
        if outside is not None:
            outside.begin()
        try:
            value = self.func(state, **arguments)
        except BaseException as error:
            here, failure = home(), at_line(error, line_of(error, self.func))
            here.call(state.executor.fail, failure)
            here.call(state.run.cancel)
            if outside is not None:
                outside.end(failure)
            state.close()
            state.returned.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        state.close()
        state.returned.set_result(value)

    def run_batch(
        self,
        batch_kwargs: Sequence[Mapping[str, Any] | Sequence[Any]],
        *,
        backend: Any = None,
        num_threads: int | str = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        **sampling: Any,
    ) -> list[ProgramState] | Iterator[ProgramState]:
        """Run the program once for each item.

        The text that all runs begin with is computed once before they start: constant text, bound arguments, and
        arguments that are the same in every item.

        Args:
            batch_kwargs: arguments of each run, by name (a dict) or by place (a tuple).
            num_threads: runs at once. "auto": functions run in up to 64 threads, and a run whose function has returned
                holds none, so that up to 1024 are under way.
            progress_bar: show how many are done.
            generator_style: return an iterator that starts runs as it is read, and gives them in order.

        Returns:
            A state for each item, in order. One that failed tells so when it is used.
        """
        unknown = [name for name in sampling if name not in Params.__struct_fields__]
        if unknown:
            raise ProgramError(f"run_batch has no parameter {unknown[0]!r}", caller())
        items = [self.arguments(*_apart(item)) for item in batch_kwargs]
        plan = batch.Batch(self, items, backend_for(backend), make(sampling), num_threads, progress_bar)
        return plan.run_lazily() if generator_style else list(plan.run())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program; or with a state as first argument, go on in that state and return what the program does."""
        from radixlm.lang.trace import TracedState

        if args and isinstance(args[0], ProgramState | TracedState):
            return self.func(args[0], **self.arguments(args[1:], kwargs))
        return self.run(*args, **kwargs)

    # ---- looking ahead

    def trace(self, backend: Any = None, **arguments: Any) -> Graph:
        """The program as a graph. Arguments that are not given are placeholders.

        Raises:
            ProgramError: the backend (if one is named) cannot do what the program asks.
            TraceError: what the program does depends on the value of a placeholder.
        """
        from radixlm.lang.trace import trace

        return trace(self, arguments, backend_for(backend) if backend is not None else None)

    def compile(self, backend: Any = None, **arguments: Any) -> Compiled:
        """The program as a graph that is run without calling the function again. Raises as `trace`."""
        from radixlm.lang.compiled import Compiled

        return Compiled(self, self.trace(backend, **arguments), backend)

    def cache(self, backend: Any = None, **arguments: Any) -> str:
        """Have the text that every run begins with computed. Returns it ("" if it is too short to be worth a call)."""
        from radixlm.lang.trace import shared_prefix

        return batch.warm(backend_for(backend), shared_prefix(self, arguments))

    def __repr__(self) -> str:
        return f"<radixlm.function {self.func.__name__}>"


def split(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(sampling parameters, the program's own arguments)."""
    said = {name: value for name, value in kwargs.items() if name in Params.__struct_fields__}
    return said, {name: value for name, value in kwargs.items() if name not in said}


def _apart(item: Mapping[str, Any] | Sequence[Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    if isinstance(item, Mapping):
        return (), item
    if isinstance(item, list | tuple):
        return item, {}
    raise ProgramError(f"an item of a batch is a dict or a tuple of arguments, not {type(item).__name__}", caller())


def line_of(error: BaseException, func: Callable[..., Any]) -> str:
    """The line of the program's own file at which an error passed."""
    file = func.__code__.co_filename if hasattr(func, "__code__") else ""
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    linecache.checkcache(file)
    return f"{file}:{lines[-1].lineno}" if lines else ""


@overload
def function(func: Callable[..., Any]) -> Function: ...
@overload
def function(
    func: None = None, *, num_api_spec_tokens: int | None = None
) -> Callable[[Callable[..., Any]], Function]: ...


def function(
    func: Callable[..., Any] | None = None, *, num_api_spec_tokens: int | None = None
) -> Function | Callable[[Callable[..., Any]], Function]:
    """Make a program of a function whose first parameter is called `s`: `@function` or `@function(...)`."""
    if func is not None:
        return Function(func)
    return lambda given: Function(given, num_api_spec_tokens)
