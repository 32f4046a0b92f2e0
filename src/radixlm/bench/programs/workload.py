"""This module owns `Workload`: a program and the items that it is run over, made of real text by a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from radixlm.bench.source import Cutter, plain_text
from radixlm.lang.program import Function


@dataclass(frozen=True, slots=True)
class Workload:
    """
    Attributes:
        about: what it has the structure of.
        program: makes texts of a fixed length (greedy, end tokens ignored), so that every variant has the same work.
        items: arguments of each run.
    """

    name: str
    about: str
    program: Function
    items: list[dict[str, Any]]


class Words:
    """Pieces of real text, no two alike. What is drawn is a function of the seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._cutter = Cutter(plain_text(), self.random)

    def text(self, tokens: int) -> str:
        """About so many tokens, in one line."""
        return " ".join(self._cutter.text(tokens).split())

    def texts(self, count: int, tokens: int) -> list[str]:
        return [self.text(tokens) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Size:
    """How much of a workload is run.

    Attributes:
        scale: 1 is what a small machine does in seconds.
    """

    scale: float = 1.0

    def count(self, of: int) -> int:
        """At least 2, so that there is something to share."""
        return max(2, round(of * self.scale))


Make = Callable[[Words, Size], Workload]
