"""This module owns the watchdog: a thread that notices when a step takes too long, shows where it is stuck and ends
the process.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time

log = logging.getLogger("radixlm.engine")

#: Exit status of a process that its watchdog ended.
STUCK_STATUS = 70


class Watchdog:
    """`beat()` before every step, `rest()` when idle. A step longer than `seconds` ends the process with a stack
    dump.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last: float | None = None
        self._resumed = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def beat(self) -> None:
        resting = self._last is None
        self._last = time.monotonic()
        if resting:
            self._resumed.set()

    def rest(self) -> None:
        self._last = None
        self._resumed.clear()

    def close(self) -> None:
        self._stopped.set()
        self._resumed.set()

    def _watch(self) -> None:
        while not self._stopped.is_set():
            self._resumed.wait()  # an idle engine costs nothing, its watchdog included
            if self._stopped.wait(min(self._seconds / 4, 5.0)):
                return
            last = self._last
            if last is not None and time.monotonic() - last > self._seconds:
                log.critical("a step has been running for over %g s; stacks of all threads follow", self._seconds)
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
                os._exit(STUCK_STATUS)
