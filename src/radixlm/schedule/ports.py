"""This module owns the scheduler's own plug-in points: gates, which say "not yet", and orders, which say "who
first".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from radixlm.schedule.sequence import Sequence


class Gate(Protocol):
    """May a waiting sequence start? A gate holds it back without refusing it; others may pass meanwhile."""

    def begin(self, running: Iterable[Sequence]) -> None:
        """A round of admission starts; `running` already hold rows."""
        ...

    def admits(self, sequence: Sequence) -> bool: ...

    def admitted(self, sequence: Sequence) -> None:
        """The sequence has just been admitted in this round."""
        ...


class Order(Protocol):
    """The order in which waiting sequences are tried."""

    def arrange(self, waiting: list[Sequence], now: float) -> list[Sequence]: ...
