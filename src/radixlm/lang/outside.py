"""This module owns the reading of a state from outside while its program still runs: what the program has not come to
yet is waited for.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

from radixlm.lang.errors import ProgramError
from radixlm.lang.interp import Slot


class Outside:
    """Between a program in a thread of its own and whoever reads its state meanwhile."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._program: threading.Thread | None = None
        self._over = threading.Event()
        self._wanted: dict[str, tuple[Slot, str]] = {}

    def begin(self) -> None:
        """The program runs in the calling thread."""
        self._program = threading.current_thread()

    def end(self, failure: ProgramError | None = None) -> None:
        """The program has returned or failed: what it has not made will not come."""
        with self._lock:
            self._over.set()
            wanted, self._wanted = self._wanted, {}
        for name, (slot, where) in wanted.items():
            missing = ProgramError(f"the program has ended, and there is no variable {name!r} in it", where)
            slot.set_exception(failure or missing)

    def here(self) -> bool:
        """Whether the caller is outside of the program, which is still running."""
        return threading.current_thread() is not self._program and not self._over.is_set()

    def wait(self) -> None:
        """Until the program has returned, if the caller is outside of it."""
        if self.here():
            self._over.wait()

    def want(self, name: str, slots: dict[str, Slot], where: str) -> Slot | None:
        """The variable of that name, which need not exist yet. None if it does not and nobody is left to make it."""
        with self._lock:
            found = slots.get(name)
            if found is None and self.here():
                found, _ = self._wanted.setdefault(name, (Future(), where))
        return found

    def declare(self, name: str, slot: Slot, slots: dict[str, Slot]) -> None:
        """The program has come to a variable of that name."""
        with self._lock:
            slots[name] = slot
            wanted, _ = self._wanted.pop(name, (None, ""))
        if wanted is not None:
            slot.add_done_callback(lambda done: _hand_on(done, wanted))


def _hand_on(done: Future[Any], wanted: Slot) -> None:
    error = done.exception()
    if error is not None:
        wanted.set_exception(error)
    else:
        wanted.set_result(done.result())
