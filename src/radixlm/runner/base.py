"""This module owns the protocol of a runner: what the engine's loop asks of whatever executes plans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from radixlm.base.facts import EngineFacts
from radixlm.base.plan import Ints, Outcome, Plan

#: Span index -> the ids allowed for its sampled token, as bits: id i is bit i % 32 of word i // 32.
Masks = Mapping[int, Ints]


class EngineLost(BaseException):
    """No step can be computed any more: ranks are out of step, or one is gone. The message is the reason.

    Not an `Exception`: the engine's loop outlives steps that fail, and must not outlive this.
    """


class Pending(Protocol):
    """A step in flight."""

    def wait(self) -> Outcome:
        """Block until the step is done. Called once, in plan order."""
        ...


class Executor(Protocol):
    """Executes plans in the order they are given. `forward` and `sample` queue work and do not wait for it."""

    facts: EngineFacts

    def forward(self, plan: Plan) -> Any:
        """Take in the plan and start the forward pass. Returns the `Pending` step."""
        ...

    def sample(self, pending: Any, masks: Masks | None = None) -> None:
        """Choose the next tokens of the spans that sample; always called, right after `forward` of the same plan."""
        ...
