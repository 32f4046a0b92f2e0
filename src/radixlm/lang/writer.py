"""This module owns what a program may append to a state, and the ways to write it: the same while it runs and while it
is traced.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from radixlm.lang.errors import ProgramError, at_line, caller
from radixlm.lang.ir import (
    Expr,
    Gen,
    Hole,
    Image,
    Reasoning,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    Select,
    Text,
    flat,
)


class Standing:
    """Where in its text a state stands, as far as the program alone decides it. Copied by forks.

    Attributes:
        role: that is open, "" for none.
        chat: whether the text is a chat, None while it is empty.
    """

    __slots__ = ("chat", "role")

    def __init__(self, role: str = "", chat: bool | None = None) -> None:
        self.role = role
        self.chat = chat

    def take(self, node: Expr) -> None:
        """Go on by a node. Raises `ProgramError` if it may not stand here."""
        if isinstance(node, RoleBegin):
            if self.role:
                raise ProgramError(f"the role {node.role} begins within the role {self.role}; roles do not nest")
            if self.chat is False:
                raise ProgramError(f"the role {node.role} follows plain text; a text is either a chat or plain")
            self.role, self.chat = node.role, True
        elif isinstance(node, RoleEnd):
            if self.role != node.role:
                open_now = f"the open role is {self.role}" if self.role else "no role is open"
                raise ProgramError(f"the role {node.role} ends, but {open_now}")
            self.role = ""
        elif isinstance(node, Text | Hole | Gen | Select | Image | Reasoning):
            if isinstance(node, Text) and not node.text:
                return
            if self.chat and not self.role:
                raise ProgramError(
                    "there is text between the messages of a chat; put it into a role (system, user, assistant)"
                )
            if isinstance(node, Image) and not self.role:
                raise ProgramError("an image belongs to a message; put it into a role, such as user(image(...) + ...)")
            self.chat = bool(self.role)

    def join(self, others: Sequence[Standing], *, append: bool) -> None:
        """Take home the states of a fork. Raises `ProgramError` if their text cannot follow here."""
        for other in others if append else ():
            if other.role != self.role:
                raise ProgramError(
                    f"the fork is joined within the role {self.role or 'none'}, and one of its states is within "
                    f"{other.role or 'none'}; begin and end roles on the same side of a fork"
                )
            self.chat = self.chat or other.chat

    def copy(self) -> Standing:
        return Standing(self.role, self.chat)


class Writer(ABC):
    """The writing half of a state."""

    @abstractmethod
    def submit(self, node: Expr, where: str) -> None:
        """Append one node, which came from a line of the program."""

    def __iadd__(self, other: Any) -> Self:
        self._extend(other)
        return self

    def _extend(self, other: Any) -> None:
        if other is None:
            raise ProgramError("None was appended to a state; does a function lack its return?", caller())
        where = caller()
        try:
            for node in flat(other):
                self.submit(node, where)
        except ProgramError as error:
            raise at_line(error, where) from None

    def system(self, expr: Any = None) -> Any:
        """Append a system message; without an argument, a context within which one is appended."""
        return self._role("system", expr)

    def user(self, expr: Any = None) -> Any:
        """Append a message of the user, or a context for one."""
        return self._role("user", expr)

    def assistant(self, expr: Any = None) -> Any:
        """Append a message of the assistant, or a context for one."""
        return self._role("assistant", expr)

    def _role(self, role: str, expr: Any) -> Any:
        if expr is None:
            return self._between(RoleBegin(role), RoleEnd(role))
        self._extend((RoleBegin(role), *flat(expr), RoleEnd(role)))
        return self

    def var_scope(self, name: str) -> Any:
        """A context: all that is appended within it is the value of a variable."""
        if not name:
            raise ProgramError("var_scope needs the name of a variable", caller())
        return self._between(ScopeBegin(name), ScopeEnd(name))

    @contextmanager
    def _between(self, begin: Expr, end: Expr) -> Iterator[Self]:
        self._extend(begin)
        yield self
        self._extend(end)
