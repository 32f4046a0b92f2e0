"""This module owns the trace of a GPU while it is measured: which kernels ran, for how long, and when none did."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radixlm.base.errors import StartupError
from radixlm.bench import report
from radixlm.bench.summary import Distribution

#: A launch of at least so many kernels is a captured step.
STEP_KERNELS = 16


@dataclass(frozen=True, slots=True)
class Kernel:
    """Something that the device did: a kernel or a copy. Times in seconds.

    Attributes:
        launch: number of the host's call that caused it. All kernels of a captured step have the same.
    """

    name: str
    start: float
    seconds: float
    launch: int

    @property
    def end(self) -> float:
        return self.start + self.seconds


class Timeline:
    """What a device did, in the order in which it began."""

    def __init__(self, kernels: Sequence[Kernel]) -> None:
        self.kernels = sorted(kernels, key=lambda kernel: kernel.start)

    @property
    def seconds(self) -> float:
        """From the first kernel's start to the last one's end."""
        return max(k.end for k in self.kernels) - self.kernels[0].start if self.kernels else 0.0

    @property
    def busy(self) -> float:
        """Seconds in which at least one kernel ran."""
        total, end = 0.0, float("-inf")
        for kernel in self.kernels:
            if kernel.end > end:
                total += kernel.end - max(kernel.start, end)
                end = kernel.end
        return total

    def steps(self) -> list[tuple[float, float]]:
        """(start, end) of every captured step."""
        spans: dict[int, tuple[float, float, int]] = {}
        for kernel in self.kernels:
            start, end, count = spans.get(kernel.launch, (kernel.start, kernel.end, 0))
            spans[kernel.launch] = (min(start, kernel.start), max(end, kernel.end), count + 1)
        return sorted((start, end) for start, end, count in spans.values() if count >= STEP_KERNELS)

    def gaps(self) -> list[float]:
        """Seconds between the end of a captured step and the start of the next one, where nothing else came between
        them but what belongs to every step (copies of results, uploads of changes).
        """
        steps = self.steps()
        between = [(a[1], b[0]) for a, b in itertools.pairwise(steps)]
        found, at = [], 0
        for end, start in between:
            while at < len(self.kernels) and self.kernels[at].start < end:
                at += 1
            last = at
            while last < len(self.kernels) and self.kernels[last].start < start:
                last += 1
            if last - at < STEP_KERNELS:
                found.append(start - end)
        return found

    def by_name(self) -> list[tuple[str, float, int]]:
        """(name, seconds, how often), those with the most seconds first."""
        totals: dict[str, tuple[float, int]] = {}
        for kernel in self.kernels:
            seconds, count = totals.get(kernel.name, (0.0, 0))
            totals[kernel.name] = (seconds + kernel.seconds, count + 1)
        return sorted(((name, *total) for name, total in totals.items()), key=lambda line: -line[1])


def record(work: Callable[[], object], path: Path | None = None) -> Timeline:
    """Do `work` and trace the GPU meanwhile. The host is slowed down a little.

    Args:
        path: where the trace is written for viewers of Chrome's format (chrome://tracing, Perfetto).
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        raise StartupError("--trace reads a GPU's kernels, and this machine has no GPU that torch can use")
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        work()
        torch.cuda.synchronize()
    if path is not None:
        profiler.export_chrome_trace(str(path))
    results: Any = profiler.profiler
    events = results.kineto_results.events()
    return Timeline(
        [
            Kernel(event.name(), event.start_ns() / 1e9, event.duration_ns() / 1e9, event.correlation_id())
            for event in events
            if event.device_type().name == "CUDA"
        ]
    )


def show(timeline: Timeline, lines: int = 16) -> None:
    """Print where the device's time went."""
    seconds = timeline.seconds
    if not seconds:
        print("the trace is empty: nothing ran on the device")
        return
    cells = [("device busy", f"{timeline.busy:.3f} s of {seconds:.3f} s ({timeline.busy / seconds:.1%})")]
    steps, gaps = timeline.steps(), timeline.gaps()
    length, gap = Distribution.of(end - start for start, end in steps), Distribution.of(gaps)
    if length is not None and gap is not None:
        share = gap.mean / (gap.mean + length.mean)
        cells += [
            ("captured steps", f"{len(steps)}, {length.median * 1e3:.3f} ms in the median"),
            ("gap between them", f"{gap.median * 1e6:.1f} us in the median, {share:.2%} of the time"),
        ]
    report.grid("trace of the device", (), cells)
    total = sum(kernel.seconds for kernel in timeline.kernels)
    report.grid(
        "",
        ("kernel", "ms", "share", "calls", "us a call"),
        [
            (name[:90], f"{took * 1e3:.2f}", f"{took / total:.1%}", f"{count}", f"{took / count * 1e6:.1f}")
            for name, took, count in timeline.by_name()[:lines]
        ],
    )
