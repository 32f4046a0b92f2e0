"""This module owns how many calls of programs are in flight at once, and whose turn is next."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """Lets `limit` calls through at once. Programs that wait take turns, one call each, so that one with ten thousand
    forks cannot keep another one waiting. Lives on the loop.

    Args:
        each: calls of one program at once, None for no limit.
    """

    def __init__(self, limit: int, each: int | None = None) -> None:
        self._free = limit
        self._each = each
        self._busy: Counter[int] = Counter()
        self._waiting: OrderedDict[int, deque[asyncio.Future[None]]] = OrderedDict()

    @property
    def waiting(self) -> int:
        """Programs with calls that are not let through yet."""
        return len(self._waiting)

    @asynccontextmanager
    async def turn(self, program: int) -> AsyncIterator[None]:
        await self._enter(program)
        try:
            yield
        finally:
            self._leave(program)

    async def _enter(self, program: int) -> None:
        if self._free > 0 and program not in self._waiting and self._may(program):
            self._free -= 1
            self._busy[program] += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(program, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave(program)  # it was let in at the same moment
            raise

    def _leave(self, program: int) -> None:
        self._free += 1
        self._busy[program] -= 1
        if not self._busy[program]:
            del self._busy[program]
        self._admit()

    def _admit(self) -> None:
        """Let in as many as there is room for: the program that was served longest ago goes first."""
        for program in list(self._waiting):
            if self._free <= 0:
                return
            if not self._may(program):
                continue
            line = self._waiting[program]
            while line and line[0].done():
                line.popleft()  # cancelled
            if line:
                self._free -= 1
                self._busy[program] += 1
                line.popleft().set_result(None)
            if line:
                self._waiting.move_to_end(program)
            else:
                del self._waiting[program]

    def _may(self, program: int) -> bool:
        return self._each is None or self._busy[program] < self._each
