"""This module owns the picture of a load: distributions of TTFT and ITL, throughput and running requests over time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from radixlm.base.errors import StartupError
from radixlm.bench.loadgen import Record, Run

FORMATS = (".png", ".svg", ".pdf")
#: Bars of the throughput panel, at most.
BINS = 60


def require(path: Path) -> None:
    """Raise `StartupError` if a plot cannot be written there: asked before a load is run, not after it."""
    if path.suffix.lower() not in FORMATS:
        raise StartupError(f"--plot {path}: the name must end in {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise StartupError(f"--plot {path}: there is no directory {path.parent}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise StartupError("--plot needs matplotlib; install it with: pip install 'radixlm[plot]'") from None


def plot(run: Run, title: str, path: Path) -> None:
    """Draw a run and write it to `path` (PNG, SVG or PDF by its ending)."""
    from matplotlib.figure import Figure

    done = [record for record in run.records if record.error is None]
    figure = Figure(figsize=(11, 7), layout="constrained")
    figure.suptitle(title, fontsize=11)
    (ttft, itl), (throughput, running) = figure.subplots(2, 2)
    _cdf(ttft, [(record.first - record.due) * 1e3 for record in done], "time to first token, ms")
    gaps = [(b - a) * 1e3 for record in done for a, b in itertools.pairwise(record.stamps)]
    _cdf(itl, gaps, "time between tokens, ms")
    _throughput(throughput, done, run.seconds)
    _running(running, run.records)
    figure.savefig(path, dpi=130)


def _cdf(axes: Any, values: Sequence[float], label: str) -> None:
    ordered = sorted(values)
    axes.plot(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], drawstyle="steps-post")
    for at in (0.5, 0.9, 0.99):
        axes.axhline(at, color="0.8", linewidth=0.8, zorder=0)
    axes.set(xlabel=label, ylabel="share of " + ("requests" if "first" in label else "gaps"), ylim=(0, 1.02))
    axes.set_xlim(left=0)


def histogram(stamps: Sequence[float], weights: Sequence[float], seconds: float, bins: int) -> list[float]:
    """Weight per second in each of `bins` equal parts of [0, seconds]."""
    width = seconds / bins
    totals = [0.0] * bins
    for stamp, weight in zip(stamps, weights, strict=True):
        totals[min(bins - 1, int(stamp / width))] += weight
    return [total / width for total in totals]


def _throughput(axes: Any, done: Sequence[Record], seconds: float) -> None:
    stamps: list[float] = []
    weights: list[float] = []
    for record in done:
        if record.stamps:
            each = record.output_tokens / len(record.stamps)
            stamps += record.stamps
            weights += [each] * len(record.stamps)
    if stamps and seconds > 0:
        edges = [seconds * i / BINS for i in range(BINS + 1)]
        axes.stairs(histogram(stamps, weights, seconds, BINS), edges, fill=True, alpha=0.6)
    axes.set(xlabel="seconds", ylabel="output tokens a second")
    axes.set_ylim(bottom=0)


def running_steps(records: Sequence[Record]) -> tuple[list[float], list[int]]:
    """(times, requests in flight from each time on)."""
    changes = sorted(
        [(r.sent, 1) for r in records if r.end > r.sent] + [(r.end, -1) for r in records if r.end > r.sent]
    )
    times, counts = [0.0], [0]
    for at, change in changes:
        times.append(at)
        counts.append(counts[-1] + change)
    return times, counts


def _running(axes: Any, records: Sequence[Record]) -> None:
    times, counts = running_steps(records)
    axes.plot(times, counts, drawstyle="steps-post")
    axes.set(xlabel="seconds", ylabel="requests in flight")
    axes.set_ylim(bottom=0)
