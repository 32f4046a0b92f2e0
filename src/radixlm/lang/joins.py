"""This module owns how what the states of a fork made comes home."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from radixlm.lang.interp import Executor, Slot, Value


async def _nothing(executor: Executor) -> None:
    return None


async def _done(executors: Sequence[Executor]) -> None:
    """Wait until everything queued in them is done. Raises what failed."""
    await asyncio.gather(*(asyncio.wrap_future(executor.ask(_nothing)) for executor in executors))


async def append_all(children: Sequence[Executor], parent: Executor) -> None:
    """Append the texts of states of a fork, in order."""
    await _done(children)
    for child in children:
        parent.take_over(child)
    if parent.content.messages:
        await parent.catch_up()


async def gather_all(
    children: Sequence[Executor],
    names: Sequence[str],
    found: Sequence[Sequence[Slot]],
    mine: Sequence[Slot],
    parent: Executor,
) -> None:
    """Fill the variables of a parent with lists of those of its fork.

    Args:
        found: for each name the slots of the states that have it.
        mine: for each name the parent's slot.
    """
    await _done(children)
    for name, slots, slot in zip(names, found, mine, strict=True):
        values = [await asyncio.wrap_future(one) for one in slots]
        parent.fill(slot, name, Value([v.value for v in values], {"states": [v.meta for v in values]}))
