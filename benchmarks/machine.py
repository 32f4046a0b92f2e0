"""This module owns what is read from /proc: who uses the processor and how much memory a process tree holds."""

from __future__ import annotations

import os
import platform
import threading
import time

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat after the command's name; the first is the state."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()


def tree(root: int) -> list[int]:
    """A process and all its descendants."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                children.setdefault(int(_stat(int(name))[1]), []).append(int(name))
            except OSError:  # it ended meanwhile
                continue
    found, todo = [], [root]
    while todo:
        pid = todo.pop()
        found.append(pid)
        todo += children.get(pid, [])
    return found


def resident(pids: list[int]) -> int:
    """Bytes of resident memory, shared pages counted in each process."""
    total = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/statm") as file:
                total += int(file.read().split()[1]) * PAGE
        except OSError:
            continue
    return total


def cpu_seconds(pids: list[int]) -> float:
    """User and system time of processes, with that of their ended children."""
    total = 0
    for pid in pids:
        try:
            total += sum(map(int, _stat(pid)[11:15]))
        except OSError:
            continue
    return total / TICKS


def _busy() -> tuple[float, float]:
    """(core-seconds in use, core-seconds stolen by the host) since boot."""
    with open("/proc/stat") as file:
        fields = [int(field) for field in file.readline().split()[1:9]]
    idle, waiting, stolen = fields[3], fields[4], fields[7]
    return (sum(fields) - idle - waiting - stolen) / TICKS, stolen / TICKS


class Noise:
    """Cores that other processes used while this context was open (`other`), our own (`used`), and `stolen` ones."""

    def __enter__(self) -> Noise:
        self._started = time.time()
        self._own = cpu_seconds(tree(os.getpid()))
        self._busy, self._stolen = _busy()
        return self

    def __exit__(self, *failure: object) -> None:
        seconds = max(1e-3, time.time() - self._started)
        busy, stolen = _busy()
        self.used = (cpu_seconds(tree(os.getpid())) - self._own) / seconds
        self.other = max(0.0, (busy - self._busy) / seconds - self.used)
        self.stolen = (stolen - self._stolen) / seconds


def wait_quiet(limit: float, seconds: float) -> None:
    """Wait until others use less than `limit` cores, but no longer than `seconds`."""
    end = time.time() + seconds
    while time.time() < end:
        with Noise() as noise:
            time.sleep(0.5)
        if noise.other <= limit:
            return


class PeakMemory(threading.Thread):
    """Follows the resident memory of a process tree; `peak` is in bytes."""

    def __init__(self, root: int) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self._root = root
        self._ended = threading.Event()

    def run(self) -> None:
        pids: list[int] = []
        listed = 0.0
        while not self._ended.wait(0.1):
            if time.time() - listed > 2:
                pids, listed = tree(self._root), time.time()
            self.peak = max(self.peak, resident(pids))

    def stop(self) -> None:
        self._ended.set()
        self.join()


def conditions() -> dict[str, object]:
    """What the machine is."""
    with open("/proc/cpuinfo") as file:
        lines = [line.partition(":") for line in file]
    said = {name.strip(): value.strip() for name, _, value in reversed(lines)}
    flags = said.get("flags", "").split()
    return {
        "cpu": said.get("model name", "?"),
        "cores": len(os.sched_getaffinity(0)),
        "amx": "amx_bf16" in flags,
        "avx512_bf16": "avx512_bf16" in flags,
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
    }
