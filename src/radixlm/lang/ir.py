"""This module owns the nodes that programs are made of. They are frozen; `+` puts them in a row.

What a program appends to a state is a text, a node, or several in a row (`Row`). Whoever runs programs, the interpreter
or the tracer, is handed nodes one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from radixlm.lang.errors import ProgramError, TraceError, caller
from radixlm.lang.params import Params

#: The roles that a chat has.
ROLES = ("system", "user", "assistant")

METHODS = ("token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized")


@dataclass(frozen=True, slots=True)
class Expr:
    """Anything that can be appended to a state."""

    def __add__(self, other: Any) -> Row:
        return Row((*flat(self), *flat(other)))

    def __radd__(self, other: Any) -> Row:
        return Row((*flat(other), *flat(self)))


@dataclass(frozen=True, slots=True)
class Row(Expr):
    """Nodes one after another."""

    items: tuple[Expr, ...] = ()


@dataclass(frozen=True, slots=True)
class Text(Expr):
    text: str


@dataclass(frozen=True, slots=True)
class Gen(Expr):
    """A text that the model generates. `name` is the variable that holds it, "" for none."""

    name: str
    params: Params = field(default_factory=Params)


@dataclass(frozen=True, slots=True)
class Select(Expr):
    """The most likely of several texts (see `lang.choices`)."""

    name: str
    choices: tuple[str, ...]
    method: str = METHODS[0]


@dataclass(frozen=True, slots=True)
class Image(Expr):
    """A picture: a URL (`http`, `https` or `data`) or the path of a file."""

    source: str


@dataclass(frozen=True, slots=True)
class RoleBegin(Expr):
    role: str


@dataclass(frozen=True, slots=True)
class RoleEnd(Expr):
    role: str


@dataclass(frozen=True, slots=True)
class ScopeBegin(Expr):
    """What is appended from here on is the value of a variable."""

    name: str


@dataclass(frozen=True, slots=True)
class ScopeEnd(Expr):
    name: str


@dataclass(frozen=True, slots=True)
class Reasoning(Expr):
    """Generated texts whose reasoning is put aside, in `<name>_reasoning_content`."""

    items: tuple[Expr, ...]
    model_type: str


def flat(value: Any) -> Iterator[Expr]:
    """The nodes of whatever may be appended.

    Raises:
        ProgramError: a state cannot be extended by it.
    """
    if isinstance(value, Row):
        yield from value.items
    elif isinstance(value, Expr):
        yield value
    elif isinstance(value, str):
        yield Text(value)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from flat(item)
    else:
        raise ProgramError(
            f"a state is extended by text and by gen, select, user and the like, not by {type(value).__name__}"
        )


def whole(value: Any) -> Row:
    return value if isinstance(value, Row) else Row(tuple(flat(value)))


@dataclass(frozen=True, slots=True, eq=False)
class Hole(Expr):
    """A text that is not known while a program is traced. Whatever needs its value raises.

    Attributes:
        what: for the reader of errors and drawings.
    """

    what: str

    def _refuse(self, deed: str) -> Any:
        raise TraceError(f"{deed} needs the value of {self.what}, which is not known while tracing", caller())

    def __str__(self) -> str:
        hint = f"formatting it as text; write s += ... + {self.what} in place of an f-string, which"
        return str(self._refuse(hint))

    def __format__(self, spec: str) -> str:
        return str(self)

    def __bool__(self) -> bool:
        return bool(self._refuse("asking whether it is empty"))

    def __len__(self) -> int:
        return int(self._refuse("its length"))

    def __iter__(self) -> Iterator[Any]:
        self._refuse("iterating over it")
        return iter(())

    def __getitem__(self, key: Any) -> Any:
        return self._refuse("a part of it")

    def __contains__(self, item: Any) -> bool:
        return bool(self._refuse("looking into it"))

    def __eq__(self, other: object) -> bool:
        return self is other or bool(self._refuse("comparing it"))

    def __hash__(self) -> int:
        return id(self)

    def __int__(self) -> int:
        return int(self._refuse("making a number of it"))

    __lt__ = __le__ = __gt__ = __ge__ = __eq__
    __float__ = __int__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse(f".{name}")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Argument(Hole):
    """An argument of the program."""

    name: str = ""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Variable(Hole):
    """A variable of a traced state: `stream` is the state's number, `node` the number of what fills it."""

    name: str = ""
    stream: int = 0
    node: int = 0
