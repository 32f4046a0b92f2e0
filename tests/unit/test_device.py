"""What is read of a machine, seen on machines made of files, and which device is taken."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from radixlm.base.errors import StartupError
from radixlm.device.cpu import CpuDevice
from radixlm.device.machine import read
from radixlm.device.select import choose, open_device

GB = 1 << 30


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


CPUINFO = """processor\t: 0
model name\t: Some CPU @ 3 GHz
flags\t\t: fpu avx2 avx512_bf16 amx_bf16

processor\t: 1
"""
MEMINFO = f"""MemTotal: {64 * GB // 1024} kB
MemFree: 1024 kB
MemAvailable: {48 * GB // 1024} kB
HugePages_Total: 0
"""
PLAIN = {"proc/meminfo": MEMINFO, "proc/cpuinfo": CPUINFO, "proc/self/cgroup": "0::/\n"}


def test_a_machine_without_limits(tmp_path: Path) -> None:
    found = read(machine(tmp_path, PLAIN), cpus=range(8))
    assert found.name == "Some CPU @ 3 GHz"
    assert found.features == ("avx2", "avx512_bf16", "amx_bf16")
    assert (found.cores, found.memory_total, found.memory_free) == (8, 64 * GB, 48 * GB)


def test_threads_of_one_core_count_once(tmp_path: Path) -> None:
    files = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu % 4},{cpu % 4 + 4}\n"
        for cpu in range(8)
    }
    root = machine(tmp_path, PLAIN | files)
    assert read(root, cpus=range(8)).cores == 4
    assert read(root, cpus=[0, 4, 5]).cores == 2


def test_limits_of_a_unified_hierarchy_and_its_parents(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/team/job"
    files = PLAIN | {
        "proc/self/cgroup": "0::/team/job\n",
        f"{group}/cpu.max": "max 100000\n",
        "sys/fs/cgroup/team/cpu.max": "350000 100000\n",
        f"{group}/memory.max": str(16 * GB),
        f"{group}/memory.current": str(10 * GB),
        f"{group}/memory.stat": f"anon 5\ninactive_file {4 * GB}\n",
        "sys/fs/cgroup/team/memory.max": "max\n",
    }
    found = read(machine(tmp_path, files), cpus=range(8))
    assert (found.cores, found.memory_total, found.memory_free) == (3, 16 * GB, 10 * GB)


def test_limits_of_separate_controllers(tmp_path: Path) -> None:
    files = PLAIN | {
        "proc/self/cgroup": "4:memory:/box\n3:cpu,cpuacct:/box\n0::/\n",
        "sys/fs/cgroup/memory/box/memory.limit_in_bytes": str(8 * GB),
        "sys/fs/cgroup/memory/box/memory.usage_in_bytes": str(9 * GB),
        "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "50000",
        "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
    }
    found = read(machine(tmp_path, files), cpus=range(8))
    assert (found.cores, found.memory_total, found.memory_free) == (1, 8 * GB, 0)


def test_a_machine_that_says_nothing_is_still_one(tmp_path: Path) -> None:
    found = read(tmp_path, cpus=[0])
    assert found.cores == 1
    assert 0 < found.memory_free <= found.memory_total
    assert found.features == ()


def test_this_machine() -> None:
    facts = CpuDevice().facts()
    assert facts.kind == "cpu" and facts.name
    assert 1 <= facts.cores <= 4096
    assert 0 < facts.memory_free <= facts.memory_total


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_share_the_cores_and_their_memory(ranks: int) -> None:
    before = torch.get_num_threads()
    try:
        device = CpuDevice(0, ranks)
        threads, reason = device.set_threads(7)
        assert threads == torch.get_num_threads() == 7 // ranks and device.sharers == ranks
        assert reason == ("asked for" if ranks == 1 else f"7 for {ranks} ranks: asked for")
        assert device.set_threads(1)[0] == 1, "no rank is without a thread"
    finally:
        torch.set_num_threads(before)


def test_a_cpu_is_always_there() -> None:
    assert choose("cpu").reason == "asked for"
    choice = choose("auto")
    assert choice.name in ("cpu", "cuda")
    assert open_device(choice).kind == choice.name


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_missing_gpu_says_why_and_what_else() -> None:
    with pytest.raises(StartupError, match=r"^device 'cuda' cannot be used here: .*(CUDA|no GPU visible); use 'cpu'$"):
        choose("cuda")
    assert "cuda: " in choose("auto").reason


def test_the_null_device_needs_no_torch() -> None:
    code = "import sys; from radixlm.device.select import choose; choose('null'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_uploads_take_any_array() -> None:
    device = CpuDevice()
    fixed = np.arange(4, dtype=np.int32)
    fixed.setflags(write=False)
    assert device.upload(fixed).tolist() == [0, 1, 2, 3]
    assert device.upload(np.ones(2)).dtype == torch.float64
    (tensor,) = device.download([torch.ones(3)]).wait()
    assert tensor.tolist() == [1, 1, 1]


def test_the_default_dtype_has_a_reason() -> None:
    dtype, reason = CpuDevice().default_dtype(torch.float16)
    features = CpuDevice().facts().features
    fast = {"amx_bf16", "avx512_bf16", "arm_bf16"} & set(features)
    assert dtype == (torch.bfloat16 if fast else torch.float32)
    assert any(feature in reason for feature in fast) if fast else "no instructions" in reason
    assert CpuDevice().default_dtype(torch.float32) == (torch.float32, "the model's")
