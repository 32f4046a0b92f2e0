"""This module owns rank 0's executor where several ranks compute one model: it has the others do what its runner does.

Each plan is encoded once and sent to every rank before this one starts on it; the ranks meet in the collectives of the
model. A second frame follows when tokens are to be sampled. The others mirror tables from the plans and draw the same
tokens from the same scores and seeds, so nothing comes back from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from radixlm.base.plan import Outcome, Plan
from radixlm.runner.base import EngineLost, Executor, Masks
from radixlm.runner.pending import PendingStep
from radixlm.wire.link import FrameOutbox
from radixlm.wire.plans import PlanWriter


class RankedStep:
    """A step in flight on all ranks."""

    def __init__(self, step: PendingStep, ranks: Ranks) -> None:
        self.step = step
        self._ranks = ranks

    def wait(self) -> Outcome:
        with self._ranks.whole():
            return self.step.wait()


class Ranks:
    """
    Args:
        runner: this rank's.
        links: to the other ranks.
        reason: what to say of an error that a step raised here: the fate of a rank, if that caused it.
    """

    def __init__(self, runner: Executor, links: Sequence[FrameOutbox], reason: Callable[[Exception], str]) -> None:
        self.facts = runner.facts
        self._runner = runner
        self._links = links
        self._reason = reason
        self._writer = PlanWriter()

    def forward(self, plan: Plan) -> RankedStep:
        """Start the plan on every rank.

        Raises:
            EngineLost: it cannot be computed. Some ranks may wait in the middle of it for others that have left it, so
                there is no going on, whatever the error was.
        """
        self._send(self._writer.plan(plan))
        with self.whole():
            return RankedStep(_sound(self._runner.forward(plan)), self)

    def sample(self, pending: RankedStep, masks: Masks | None = None) -> None:
        """Choose the next tokens, on every rank. Raises as `forward`."""
        self._send(self._writer.sample(masks))
        with self.whole():
            self._runner.sample(pending.step, masks)
            _sound(pending.step)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Within it an error ends the engine."""
        try:
            yield
        except Exception as error:
            raise EngineLost(self._reason(error)) from error

    def _send(self, frame: bytes) -> None:
        for link in self._links:
            link.send(frame)


def _sound(step: PendingStep) -> PendingStep:
    """A step that failed for want of memory did so on this rank alone, as far as is known."""
    if step.broken is not None:
        raise MemoryError(step.broken)
    return step
