"""This module owns the ranks of an engine: processes beside it that compute a part of its model, from start to end.

Rank 0 is whoever boots the engine. It starts the others, `python -m radixlm.launch.child rank ...`, each with the end
of a pipe: through it a rank says that it is there, or why it ends, and when it closes the rank is gone. Then nothing
can be computed any more, and the engine ends with that reason.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO

import msgspec
import zmq

from radixlm.base.errors import RadixError, StartupError
from radixlm.config.schema import Config
from radixlm.launch.topology import Topology
from radixlm.parallel.base import Place
from radixlm.runner.boot import Booted, boot
from radixlm.runner.journal import Report
from radixlm.wire.link import FrameOutbox
from radixlm.wire.messages import Boot
from radixlm.wire.plans import PlanWriter

#: Stage in which a rank is ready to meet the others.
HERE = "here"

#: Seconds that ranks get to end by themselves, then they are killed.
GRACE = 3.0

#: Seconds that a failed step waits for the news of a dead rank, which is then the reason. News are faster than that.
NEWS_SECONDS = 1.0

log = logging.getLogger("radixlm.launch")


@contextlib.contextmanager
def started(
    config: Config, report: Report, died: Callable[[str], None], topology: Topology | None = None
) -> Iterator[Booted]:
    """Boot the engine that a configuration asks for, with all its ranks; they are ended on leaving.

    Args:
        report: hears (stage, fraction of it that is done).
        died: called once with the reason, in a thread of its own, when a rank ends that was not told to. A step that is
            being computed then raises, and so does every later one (`runner.ranks.EngineLost`).
        topology: where the links go. None makes a directory for them; with one rank nothing is needed.

    Raises:
        StartupError: it cannot start; no process is left.
    """
    if config.device.tensor_parallel_size == 1:
        yield boot(config, report)
        return
    with contextlib.ExitStack() as stack:
        if topology is None:
            topology = Topology.create()
            stack.callback(topology.remove)
            atexit.register(topology.remove)  # a script may end without leaving
            stack.callback(atexit.unregister, topology.remove)
            topology.write_config(config)
        ranks = RankProcesses(config.device.tensor_parallel_size, topology, died)
        stack.callback(ranks.close)
        yield _boot(config, report, topology, ranks)


def _boot(config: Config, report: Report, topology: Topology, ranks: RankProcesses) -> Booted:
    ranks.start()
    try:
        booted = boot(config, report, Place(0, ranks.size, topology.meeting), ranks.meet)
    except RadixError:
        raise
    except Exception as error:
        # What a collective raises when another rank is gone.
        if (reason := ranks.fate(NEWS_SECONDS)) is not None:
            raise StartupError(reason) from error
        raise
    from radixlm.runner.ranks import Ranks

    ranks.work(booted.abort)
    return dataclasses.replace(booted, runner=Ranks(booted.runner, ranks.links, ranks.reason))


class RankProcesses:
    """The processes of ranks 1 .. size - 1.

    Args:
        died: see `started`.

    Attributes:
        links: to each of them, for plans.
    """

    def __init__(self, size: int, topology: Topology, died: Callable[[str], None]) -> None:
        self.size = size
        self.links: list[FrameOutbox] = []
        self._topology = topology
        self._died = died
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._watchers: list[threading.Thread] = []
        self._changed = threading.Condition()
        self._here: set[int] = set()
        self._fate: str | None = None
        self._closing = False
        self._abort: Callable[[], None] | None = None  # None until all ranks take plans

    def start(self) -> None:
        for number in range(1, self.size):
            self.links.append(FrameOutbox(self._context, self._topology.rank(number)))
            reading, writing = os.pipe()
            command = [sys.executable, "-m", "radixlm.launch.child", "rank", str(self._topology.directory)]
            process = subprocess.Popen(
                [*command, str(os.getpid()), str(number), str(writing)],
                stdin=subprocess.DEVNULL,
                pass_fds=(writing,),
                start_new_session=True,
            )
            os.close(writing)
            self._processes.append(process)
            watcher = threading.Thread(
                target=self._watch, args=(number, process, os.fdopen(reading, "rb")), name=f"rank {number}", daemon=True
            )
            self._watchers.append(watcher)
            watcher.start()

    def meet(self) -> None:
        """Wait until every rank is ready to meet the others.

        Raises:
            StartupError: one of them cannot start; the message is its reason.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._fate is not None or len(self._here) == self.size - 1)
            if self._fate is not None:
                raise StartupError(self._fate)

    def work(self, abort: Callable[[], None]) -> None:
        """From now on the ranks take plans. `abort` ends what a step here waits for when one of them is gone."""
        self._abort = abort

    def fate(self, seconds: float = 0.0) -> str | None:
        """What became of the first rank that ended, or None if all run. Waits up to `seconds` for such news."""
        with self._changed:
            self._changed.wait_for(lambda: self._fate is not None, seconds)
            return self._fate

    def reason(self, error: Exception) -> str:
        """Why a step failed that raised `error` here."""
        return self.fate(NEWS_SECONDS) or f"a step failed on rank 0: {type(error).__name__}: {error}"

    def close(self) -> None:
        """Tell the ranks to end, wait for them, kill what is left."""
        with self._changed:
            self._closing = True
        for link in self.links:
            link.send(PlanWriter().leave())
            link.close()
        # While they start, or wait for one that is gone, they do not look at their links.
        listening = self._abort is not None and self._fate is None
        limit = time.monotonic() + (GRACE if listening else 0.0)
        for number, process in enumerate(self._processes, 1):
            try:
                process.wait(max(0.0, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                if listening:
                    log.warning("rank %d did not end by itself; killing it", number)
                process.kill()
                process.wait()
        for watcher in self._watchers:
            watcher.join(1.0)
        self._context.destroy(linger=0)

    def _watch(self, number: int, process: subprocess.Popen[bytes], news: IO[bytes]) -> None:
        """Read a rank's pipe to its end, which is the rank's. (Its own thread: an idle engine must not poll.)"""
        said = ""
        with news:
            for line in news:
                try:
                    message = msgspec.json.decode(line, type=Boot)
                except msgspec.MsgspecError:
                    continue  # it was killed in the middle of a word
                said = message.error or said
                if message.stage == HERE:
                    with self._changed:
                        self._here.add(number)
                        self._changed.notify_all()
        status = process.wait()
        how = f"was ended by signal {-status}" if status < 0 else f"exited with status {status}"
        with self._changed:
            if self._closing or self._fate is not None:
                return
            self._fate = said or f"the process of rank {number} {how}"
            self._changed.notify_all()
        self._died(self._fate)
        if self._abort is not None:
            self._abort()
