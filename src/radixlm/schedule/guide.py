"""This module owns the port of guides: what steers one sequence (a grammar, a budget for thinking). The scheduler asks
and tells; it does not know what a guide knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from radixlm.base.plan import Ints
from radixlm.base.request import Request


class Guide(Protocol):
    """What a sequence may say next, or must. It is told every token behind the prompt. Any method may raise
    `RadixError`, which ends the sequence and no other.
    """

    @property
    def done(self) -> bool:
        """Nothing can follow: the sequence is complete."""
        ...

    @property
    def slack(self) -> int:
        """So many tokens may be sampled before it has a say. Below 1, the next token may depend on the last."""
        ...

    def take(self, token: int) -> None:
        """The next token of the sequence, sampled or forced."""
        ...

    def forced(self) -> Sequence[int]:
        """The tokens that must come next, in order; empty where there is a choice."""
        ...

    def mask(self) -> Ints | None:
        """The ids allowed as the next token, as bits: id i is bit i % 32 of word i // 32. None: all."""
        ...


class Ticket(Protocol):
    """A guide that is being made."""

    def guide(self) -> Guide | None:
        """The guide, or None as long as it is not ready. Raises `RadixError` if there will be none. Never waits."""
        ...


#: Starts to make a request's guide; None if nothing steers it.
MakeTicket = Callable[[Request], Ticket | None]
