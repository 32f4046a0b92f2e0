"""This module owns what a rank other than 0 does all day: take plans, compute its part, draw the same tokens."""

from __future__ import annotations

from radixlm.base.plan import Plan
from radixlm.runner.base import Executor
from radixlm.runner.pending import PendingStep
from radixlm.wire.link import FrameInbox
from radixlm.wire.plans import Leave, PlanReader


def work(runner: Executor, inbox: FrameInbox) -> None:
    """Carry out rank 0's orders until it says that there will be no more.

    Raises:
        Exception: a step failed. The other ranks wait for this one in the middle of it or are past it, so the process
            has to end, which they notice.
    """
    reader = PlanReader()
    step: PendingStep | None = None
    while not isinstance(order := reader.read(inbox.receive()), Leave):
        if isinstance(order, Plan):
            step = runner.forward(order)
        else:
            assert step is not None, "a step is sampled before it is planned"
            runner.sample(step, order.masks)
        if step.broken is not None:
            raise MemoryError(step.broken)
