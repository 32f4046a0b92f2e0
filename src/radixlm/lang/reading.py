"""This module owns the reading of a state as it is written: pieces handed from the loop to a thread or another loop."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

from radixlm.lang.errors import ProgramError, caller
from radixlm.lang.tape import News, Piece, Tape

if TYPE_CHECKING:
    from radixlm.lang.state import ProgramState


def pieces(state: ProgramState, name: str | None) -> Iterator[Piece]:
    tape = state.executor.tape
    if tape is None:
        yield Piece(name or "", state.text() if name is None else str(state.get_var(name)), last=True)
        return
    news: queue.SimpleQueue[News] = queue.SimpleQueue()
    state.run.home.call(tape.listen, news.put)
    yield from _chosen(iter(news.get, _NEVER), state, name, caller())


async def async_pieces(state: ProgramState, name: str | None) -> AsyncIterator[Piece]:
    where = caller()
    tape = state.executor.tape
    if tape is None:
        await asyncio.wrap_future(state.returned)
        text = await asyncio.to_thread(lambda: state.text() if name is None else str(state.get_var(name)))
        yield Piece(name or "", text, last=True)
        return
    mine = asyncio.get_running_loop()
    news: asyncio.Queue[News] = asyncio.Queue()

    def hear(one: News) -> None:
        if not mine.is_closed():
            mine.call_soon_threadsafe(news.put_nowait, one)

    state.run.home.call(tape.listen, hear)
    while True:
        one = await news.get()
        for piece in _chosen(iter((one,)), state, name, where):
            yield piece
            if name is not None and piece.last:
                return
        if not isinstance(one, Piece):
            return


def _chosen(news: Iterator[News], state: ProgramState, name: str | None, where: str) -> Iterator[Piece]:
    """The pieces that are wanted, up to the end. Raises what the state ended with."""
    for one in news:
        if isinstance(one, BaseException):
            raise one
        if one is None:
            if name is not None:
                yield from _late(state, name, where)
            return
        if name is None or one.name == name:
            yield one
            if name is not None and one.last:
                return


def _late(state: ProgramState, name: str, where: str) -> Iterator[Piece]:
    """A variable that was given a value without being generated here; raises if there is none of that name."""
    if name not in state:
        raise ProgramError(f"the program has ended, and there is no variable {name!r} in it", where)
    yield Piece(name, str(state.get_var(name)), state.get_meta_info(name), last=True)


_NEVER = Tape  # what no listener is ever handed
