"""This module owns the record of a start: its stages, how long each took, what was decided and why."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

Report = Callable[[str, float], None]


@dataclass(slots=True)
class Journal:
    """
    Attributes:
        report: hears (stage, fraction of it that is done) while the start goes on.
        timings, decisions: as in `EngineFacts`.
    """

    report: Report
    timings: dict[str, float] = field(default_factory=dict)
    decisions: dict[str, tuple[str, str]] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.report(name, 0.0)
        started = time.perf_counter()
        yield
        self.timings[name] = self.timings.get(name, 0.0) + time.perf_counter() - started

    def decide(self, name: str, value: object, reason: str) -> None:
        self.decisions[name] = (str(value), reason)
