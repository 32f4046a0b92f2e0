"""This module owns what the operating system says of the host: cores, memory and features that this process may use.

Every figure counts the limits of the control groups (v1 and v2) that the process is in. All paths hang below `root`, so
that a test can show it another machine.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

#: Features worth telling, by the name of the flag in /proc/cpuinfo (x86 `flags`, Arm `Features`).
FEATURES = {
    "avx2": "avx2",
    "avx512f": "avx512f",
    "avx512_vnni": "avx512_vnni",
    "avx512_bf16": "avx512_bf16",
    "avx512_fp16": "avx512_fp16",
    "amx_tile": "amx_tile",
    "amx_int8": "amx_int8",
    "amx_bf16": "amx_bf16",
    "asimd": "neon",
    "i8mm": "i8mm",
    "bf16": "arm_bf16",
    "sve": "sve",
}


@dataclass(frozen=True, slots=True)
class Machine:
    """The host. `cores`: physical cores this process may keep busy; memory in bytes."""

    name: str
    cores: int
    memory_total: int
    memory_free: int
    features: tuple[str, ...]


def read(root: Path = Path("/"), cpus: Iterable[int] | None = None) -> Machine:
    """Look at the machine.

    Args:
        cpus: logical CPUs this process may run on; None asks the system.
    """
    allowed = set(cpus) if cpus is not None else _affinity()
    groups = list(_groups(root))
    total, free = _memory(root)
    for group in groups:
        limit, used = _memory_limit(group)
        if limit is not None:
            total = min(total, limit)
            free = min(free, max(limit - used, 0))
    cores = _physical_cores(root, allowed)
    quotas = [quota for group in groups if (quota := _cpu_quota(group)) is not None]
    cores = max(1, min([cores, *(int(quota) for quota in quotas)]))
    name, features = _cpuinfo(root)
    return Machine(name, cores, total, free, features)


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _physical_cores(root: Path, allowed: set[int]) -> int:
    """Allowed CPUs, those that share a core counted once: two threads of arithmetic on one core gain nothing."""
    cores = set()
    for cpu in allowed:
        siblings = _text(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").strip()
        cores.add(siblings or str(cpu))
    return len(cores)


def _memory(root: Path) -> tuple[int, int]:
    lines = (line.split() for line in _text(root / "proc/meminfo").splitlines())
    fields = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) > 1 and words[1].isdigit()}
    if "MemTotal" in fields:
        return fields["MemTotal"], fields.get("MemAvailable", fields.get("MemFree", 0))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total, total // 2  # no way to ask; half is a careful guess


def _cpuinfo(root: Path) -> tuple[str, tuple[str, ...]]:
    name, flags = "", set[str]()
    for line in _text(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        key = key.strip()
        if key == "model name" and not name:
            name = value.strip()
        if key in ("flags", "Features"):
            flags = set(value.split())
            break
    features = tuple(shown for flag, shown in FEATURES.items() if flag in flags)
    return name or platform.processor() or platform.machine(), features


# ---- control groups


def _groups(root: Path) -> Iterator[Path]:
    """Directories of the control groups this process is in, and of their ancestors, wherever they are mounted."""
    seen = set()
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            mounts = [root / "sys/fs/cgroup"]
        else:
            mounts = [root / "sys/fs/cgroup" / name for name in (controllers, *controllers.split(","))]
        for mount in mounts:
            group = mount / path.strip("/")
            while True:
                if group not in seen and group.is_dir():
                    seen.add(group)
                    yield group
                if group == mount or mount not in group.parents:
                    break
                group = group.parent


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _cpu_quota(group: Path) -> float | None:
    """CPUs' worth of time that the group gets, or None for no limit."""
    words = _text(group / "cpu.max").split()
    if len(words) == 2 and words[0].isdigit():
        return int(words[0]) / int(words[1])
    quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
    return quota / period if quota and quota > 0 and period else None


def _memory_limit(group: Path) -> tuple[int | None, int]:
    """The group's limit (None for none) and what it uses, file pages that can be dropped at once left out."""
    for limit_name, usage_name in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit = _number(group / limit_name)
        if limit is not None:
            return limit, max((_number(group / usage_name) or 0) - _droppable(group), 0)
    return None, 0


def _droppable(group: Path) -> int:
    for line in _text(group / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key in ("total_inactive_file", "inactive_file") and value.isdigit():
            return int(value)
    return 0
