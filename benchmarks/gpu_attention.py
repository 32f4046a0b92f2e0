#!/usr/bin/env python3
"""The Triton kernels of attention, each alone: time, bytes and FLOPs against what the device can do.

    python benchmarks/gpu_attention.py            # the ways that the engine takes
    python benchmarks/gpu_attention.py --tune     # every way on a grid, and the best of each case; two minutes

Each figure is the median of replays of a CUDA graph with a launch for each of several layers, whose keys and values
together exceed the L2 cache several times. Pages are in runs of 16 tokens, as a pool in use hands them out.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from radixlm.attention import triton_ways
from radixlm.attention.base import LayerSpec, StepInputs
from radixlm.attention.tiles import Tiling
from radixlm.attention.triton import TritonAttention
from radixlm.attention.triton_ways import Way
from radixlm.base.plan import SharedPrefix
from radixlm.memory.pool import KVPool

DEVICE = torch.device("cuda")
RUN = 16
#: Bytes of keys and values that launches go round.
ROUND = 512 << 20

SPECS = {
    "8B": LayerSpec(heads=32, kv_heads=8, head_dim=128, scale=128**-0.5),
    "0.6B": LayerSpec(heads=16, kv_heads=8, head_dim=128, scale=128**-0.5),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A step: `count` spans of `length` tokens behind `start`, in groups of `group` rows that share `shared` tokens."""

    kind: str
    count: int
    start: int
    length: int = 1
    group: int = 1
    shared: int = 0

    def __str__(self) -> str:
        shared = f", {self.group} share {self.shared}" if self.shared else ""
        return f"{self.kind} {self.count} x {self.length} behind {self.start}{shared}"

    def flops(self, spec: LayerSpec) -> float:
        pairs = self.count * self.length * (self.start + (self.length + 1) / 2)
        return 4.0 * spec.heads * spec.head_dim * pairs

    def bytes(self, spec: LayerSpec) -> float:
        """Keys and values, each read once by everybody who shares them."""
        tokens = self.count * (self.start + self.length - self.shared) + self.count // self.group * self.shared
        return 4.0 * spec.kv_heads * spec.head_dim * tokens


CASES = (
    Case("decode", 1, 272),
    Case("decode", 16, 272),
    Case("decode", 64, 272),
    Case("decode", 256, 272),
    Case("decode", 64, 1152),
    Case("decode", 256, 1152),
    Case("decode", 8, 8000),
    Case("shared", 256, 2200, 1, 16, 2048),
    Case("shared", 1024, 2200, 1, 16, 2048),
    Case("extend", 64, 2048, 128),
    Case("extend", 8, 0, 1024),
    Case("extend", 2, 0, 4096),
    Case("extend", 1, 8192, 4096),
    Case("extend", 64, 0, 128),
)


class Bench:
    """The inputs and the pools of one case."""

    def __init__(self, case: Case, spec: LayerSpec, page_size: int) -> None:
        self.case, self.spec = case, spec
        tokens = case.start + case.length
        own = -(-tokens // RUN) * RUN
        slots = case.count * own + 4096
        layers = max(2, min(16, -(-ROUND // (4 * spec.kv_heads * spec.head_dim * case.count * tokens))))
        pages = slots // page_size
        self.pool = KVPool([(spec.kv_heads, spec.head_dim)] * layers, pages, page_size, torch.bfloat16, DEVICE)
        for one in self.pool.heads:
            one.normal_()
        runs = list(range(slots // RUN))
        random.Random(0).shuffle(runs)
        taken = iter(runs)
        table = np.zeros((case.count, own // page_size), np.int32)
        for row in range(case.count):
            mine = [run * RUN + i for run in itertools.islice(taken, own // RUN) for i in range(RUN)]
            table[row] = np.array(mine, np.int32)[::page_size] // page_size
            leader = row - row % case.group
            table[row, : case.shared // page_size] = table[leader, : case.shared // page_size]
        total = case.count * case.length
        positions = np.tile(np.arange(case.start, tokens), case.count)
        shared = None
        if case.shared:
            tiling = Tiling.of([spec], torch.cuda.get_device_properties(0).multi_processor_count)
            assert tiling is not None
            groups = [
                SharedPrefix(np.arange(i, i + case.group, dtype=np.int32), case.shared)
                for i in range(0, case.count, case.group)
            ]
            shared = tiling.tiles(torch.from_numpy(tiling.numbers(groups, case.count)).to(DEVICE), case.count)
        self.inputs = StepInputs(
            ids=torch.zeros(total, dtype=torch.int64, device=DEVICE),
            positions=torch.from_numpy(positions).to(DEVICE),
            slots=torch.zeros(total, dtype=torch.int64, device=DEVICE),
            rows=torch.arange(case.count, device=DEVICE),
            row_ids=list(range(case.count)),
            starts=[case.start] * case.count,
            lengths=[case.length] * case.count,
            page_table=torch.from_numpy(table).to(DEVICE),
            page_size=page_size,
            select=torch.zeros(0, dtype=torch.int64, device=DEVICE),
            decode=case.length == 1,
            shared=shared,
        )
        self.q = torch.randn(total, spec.heads, spec.head_dim, device=DEVICE, dtype=torch.bfloat16)
        self.out = self.q.new_empty(total, spec.heads * spec.head_dim)

    def calls(self) -> list[Callable[[], None]]:
        backend = TritonAttention()
        plan = backend.plan(self.inputs, self.pool)

        def call(layer: int) -> None:
            backend.attend(plan, layer, self.spec, self.pool, self.q, self.out)

        return [lambda layer=layer: call(layer) for layer in range(len(self.pool.keys))]  # type: ignore[misc]

    def time(self) -> float:
        """Microseconds a layer."""
        calls = self.calls()
        calls[0]()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        graph.replay()
        took = []
        for _ in range(5):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            took.append(begin.elapsed_time(end) * 1000 / len(calls))
        return statistics.median(took)


def ways(kind: str) -> Iterator[Way]:
    if kind == "decode":
        for block, warps, stages in itertools.product((16, 32, 64, 128), (1, 2, 4), (1, 2, 3, 4)):
            if block * stages <= 256:
                yield Way(block, warps, stages)
    elif kind == "shared":
        for block, warps, stages in itertools.product((32, 64, 128), (4, 8), (2, 3, 4)):
            yield Way(block, warps, stages)
    else:
        for rows, block, warps, stages in itertools.product((64, 128, 256), (32, 64, 128), (4, 8), (1, 2, 3)):
            if rows * 128 // warps <= 8192:
                yield Way(block, warps, stages, rows)


def take(kind: str, way: Way) -> None:
    """Make the engine's kernels of a kind go this way."""
    setattr(triton_ways, kind, lambda *_: way)


def tried(bench: Bench, way: Way) -> float:
    take(bench.case.kind, way)
    try:
        return bench.time()
    except Exception as error:  # more shared memory or registers than there are
        if "OutOfResources" not in type(error).__name__:
            raise
        return float("inf")


def compile_all(names: list[str]) -> None:
    """Compile every way in many processes, so that they are in Triton's cache on disk."""
    parts = max(1, min(14, (os.cpu_count() or 2) - 1))
    base = [sys.executable, __file__, "--specs", ",".join(names)]
    children = [subprocess.Popen([*base, "--compile", f"{part}/{parts}"]) for part in range(parts)]
    if any(child.wait() for child in children):
        raise SystemExit("compilation failed")


def compile_part(names: list[str], part: int, parts: int) -> None:
    small = {"decode": Case("decode", 2, 40), "shared": Case("shared", 4, 300, 1, 2, 256)}
    small["extend"] = Case("extend", 2, 40, 60)
    work = [(name, kind, way) for name in names for kind in small for way in ways(kind)]
    for name, kind, way in work[part::parts]:
        for case in (small[kind], *([Case("decode", 300, 40)] if kind == "decode" else [])):
            take(kind, way)
            try:
                Bench(case, SPECS[name], 1).calls()[0]()
            except Exception as error:
                if "OutOfResources" not in type(error).__name__:
                    raise
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--specs", default="8B,0.6B")
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--compile", default="", help=argparse.SUPPRESS)
    said = parser.parse_args()
    names = said.specs.split(",")
    if said.compile:
        part, parts = map(int, said.compile.split("/"))
        compile_part(names, part, parts)
        return
    if said.tune:
        compile_all(names)
    for name in names:
        spec = SPECS[name]
        print(f"\n{name}: us a layer, TB/s of keys and values, TFLOP/s; page size {said.page_size}")
        for case in CASES:
            bench = Bench(case, spec, said.page_size)

            def told(us: float, case: Case = case, spec: LayerSpec = spec) -> str:
                return f"{us:9.1f} {case.bytes(spec) / us / 1e6:6.2f} {case.flops(spec) / us / 1e6:7.1f}"

            engine = getattr(triton_ways, case.kind)
            print(f"{case!s:<46} {told(bench.time())}", flush=True)
            if said.tune:
                found = sorted((tried(bench, way), str(way)) for way in ways(case.kind))
                for us, way in found[:3]:
                    print(f"    {told(us)}  {way}", flush=True)
                setattr(triton_ways, case.kind, engine)


if __name__ == "__main__":
    main()
