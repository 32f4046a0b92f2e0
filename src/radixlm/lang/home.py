"""This module owns the event loop on which every state runs, the threads that run programs, and the default backend."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any

from radixlm.lang.errors import ProgramError

if TYPE_CHECKING:
    from radixlm.lang.backends.base import Backend

#: Threads for programs that are read while they run. They come as they are needed.
THREADS = 256


class Home:
    """One for the process. Its thread ends with the process."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.pool = ThreadPoolExecutor(THREADS, thread_name_prefix="radixlm-program")
        self.backend: Backend | None = None
        self.kept: Any = None  # what the default backend was given as: an engine must not go away meanwhile
        self.numbers = itertools.count(1)
        self._due: deque[Callable[[], None]] = deque()
        self._told = False  # the loop has been told to look at `_due`
        self._thread = threading.Thread(target=self._serve, name="radixlm-lang", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def call(self, work: Callable[..., Any], *arguments: Any) -> None:
        """Call something on the loop, soon."""
        self.loop.call_soon_threadsafe(work, *arguments)

    def soon(self, work: Callable[[], None]) -> None:
        """As `call`, for what comes in crowds: the loop is told once for all that is due."""
        self._due.append(work)
        if not self._told:
            self._told = True
            self.loop.call_soon_threadsafe(self._do_due)

    def _do_due(self) -> None:
        self._told = False  # first: what is put in from here on tells the loop again
        while self._due:
            self._due.popleft()()

    def wait(self, future: Future[Any]) -> Any:
        """The result of what the loop works on. Refused on the loop itself, which would wait for ever."""
        if threading.current_thread() is self._thread and not future.done():
            raise ProgramError("a variable is read on the thread that would have to compute it")
        return future.result()

    def do(self, work: Any) -> Any:
        """Run a coroutine on the loop and wait for its result."""
        return self.wait(asyncio.run_coroutine_threadsafe(work, self.loop))


@cache
def home() -> Home:
    return Home()


def set_default_backend(backend: Any) -> None:
    """What programs run on where `run` names no backend: an `Engine`, a server's URL, or a backend."""
    from radixlm.lang.backends.choose import as_backend

    here = home()
    here.backend, here.kept = as_backend(backend), backend


def backend_for(given: Any) -> Backend:
    """The backend that is meant.

    Raises:
        ProgramError: none is named and there is no default.
    """
    from radixlm.lang.backends.choose import as_backend

    if given is not None:
        return as_backend(given)
    default = home().backend
    if default is None:
        raise ProgramError(
            "there is no backend: pass backend=..., or call radixlm.set_default_backend with an Engine, the URL of a "
            "server, or a backend"
        )
    return default


def flush_cache(backend: Any = None) -> None:
    """Forget every cached prefix of a backend."""
    home().do(backend_for(backend).flush_cache())


def get_server_info(backend: Any = None) -> dict[str, Any]:
    """What a backend tells of itself."""
    return dict(home().do(backend_for(backend).server_info()))
