"""This module owns simulated time: a clock that only moves when told, and what a step costs on it."""

from __future__ import annotations

from dataclasses import dataclass


class VirtualClock:
    """Seconds since the simulation began. Calling it reads it, like `time.time`."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def reach(self, when: float) -> None:
        """Wait until `when`; nothing happens if it is past."""
        self.now = max(self.now, when)

    def advance(self, seconds: float) -> None:
        self.now += seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds of a step: `base`, `per_token` for each one computed, `per_context_token` for each position seen."""

    base: float = 0.0
    per_token: float = 0.0
    per_context_token: float = 0.0

    def seconds(self, tokens: int, context: int) -> float:
        return self.base + self.per_token * tokens + self.per_context_token * context
