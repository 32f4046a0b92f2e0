"""This module owns `ForkGroup`: the states of one fork, addressed together."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from radixlm.lang.errors import ProgramError, at_line, caller

if TYPE_CHECKING:
    from radixlm.lang.state import ProgramState
    from radixlm.lang.trace import TracedState

MODES = ("gather_variable", "concate_and_append")


S = TypeVar("S", bound="ProgramState | TracedState")


class ForkGroup(Generic[S]):
    """States that go on from the same text. `g[i]` is one of them; `g += ...` extends each."""

    def __init__(self, parent: S, states: list[S]) -> None:
        self._parent: Any = parent
        self._states = states
        self._joined = False

    def __getitem__(self, index: int) -> S:
        return self._states[index]

    def __setitem__(self, index: int, state: S) -> None:
        """For `g[i] += ...`, which assigns the state that it extended."""
        if self._states[index] is not state:
            raise ProgramError("a state of a fork cannot be replaced by another one", caller())

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[S]:
        return iter(self._states)

    def __iadd__(self, other: Any) -> Self:
        """Extend every state: by the same, by its own item of a list, or by what a function of its index gives."""
        where = caller()
        if isinstance(other, list | tuple):
            if len(other) != len(self._states):
                raise ProgramError(f"{len(other)} expressions for {len(self._states)} states of a fork", where)
            items = list(other)
        elif callable(other):
            try:
                inspect.signature(other).bind(0)
            except TypeError:
                raise ProgramError("a function given to a fork takes one argument, the state's index", where) from None
            items = [_called(other, index) for index in range(len(self._states))]
        else:
            items = [other] * len(self._states)
        for state, item in zip(self._states, items, strict=True):
            state += item  # appends to the state itself
        return self

    def join(self, mode: str = "gather_variable") -> None:
        """End the states and bring home what they made, without waiting for it.

        Args:
            mode: gather_variable: each variable of theirs becomes one of the parent's, a list with the value of each
                state that has it. concate_and_append: their texts are appended to the parent's, in order.
        """
        where = caller()
        if mode not in MODES:
            raise ProgramError(f"mode is {mode!r}; it is one of {', '.join(MODES)}", where)
        if self._joined:
            raise ProgramError("the fork was joined before", where)
        self._joined = True
        try:
            self._parent.gather(self._states, append=mode == "concate_and_append", where=where)
        except ProgramError as error:
            raise at_line(error, where) from None
        for state in self._states:
            state.close("it was joined")


def _called(function: Callable[[int], Any], index: int) -> Any:
    return function(index)
