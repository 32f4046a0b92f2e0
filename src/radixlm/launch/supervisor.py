"""This module owns the child processes' lives: started together, watched, ended together."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable

from radixlm.config.schema import Config
from radixlm.launch.topology import Topology

ROLES = ("engine", "detokenizer")

#: Seconds that children get to end by themselves after they were told to, before they are killed.
GRACE = 5.0

log = logging.getLogger("radixlm.launch")


class Supervisor:
    """
    Args:
        died: called with (role, exit status) when a child ends that was not told to.
    """

    def __init__(self, config: Config, topology: Topology, died: Callable[[str, int], None]) -> None:
        self._config = config
        self._topology = topology
        self._died = died
        self._children: dict[str, asyncio.subprocess.Process] = {}
        self._watchers: list[asyncio.Task[None]] = []
        self._stopping = False

    async def start(self) -> None:
        self._topology.write_config(self._config)
        for role in ROLES:
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "radixlm.launch.child",
                role,
                str(self._topology.directory),
                str(os.getpid()),
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
            self._children[role] = child
            self._watchers.append(asyncio.create_task(self._watch(role, child), name=f"watch {role}"))

    async def _watch(self, role: str, child: asyncio.subprocess.Process) -> None:
        status = await child.wait()
        if not self._stopping:
            self._died(role, status)

    def pids(self) -> dict[str, int]:
        return {role: child.pid for role, child in self._children.items()}

    def expect_exit(self) -> None:
        """From here on children may end: the server is shutting down."""
        self._stopping = True

    async def stop(self, grace: float = GRACE) -> None:
        """Wait for the children to end, then kill what is left. Without `grace` they are killed at once."""
        self._stopping = True
        running = [child for child in self._children.values() if child.returncode is None]
        if running and grace > 0:
            await asyncio.wait([asyncio.ensure_future(child.wait()) for child in running], timeout=grace)
        for role, child in self._children.items():
            if child.returncode is None:
                if grace > 0:
                    log.warning("the %s process did not end by itself; killing it", role)
                child.kill()
                await child.wait()
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
