"""This module owns how results of programs are told: a table for each workload, a summary, a picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from radixlm.bench import report
from radixlm.bench.programs.measure import Result

HEADINGS = ("", "programs/s", "vs no-cache", "latency s", "output tok/s", "hit rate", "of optimum", "same text")


def grouped(results: Sequence[Result]) -> dict[str, dict[str, Result]]:
    """Workload -> variant -> result."""
    found: dict[str, dict[str, Result]] = {}
    for result in results:
        found.setdefault(result.workload, {})[result.variant] = result
    return found


def table(results: Sequence[Result]) -> None:
    for workload, by_variant in grouped(results).items():
        first = next(iter(by_variant.values()))
        bare = by_variant.get("no-cache")
        cells = []
        for name, result in by_variant.items():
            same = sum(a == b for a, b in zip(result.texts, first.texts, strict=True))
            cells.append(
                (
                    name,
                    f"{result.rate:.2f}",
                    f"{result.rate / bare.rate:.2f} x" if bare else "",
                    f"{result.latency:.2f}",
                    f"{result.output_tokens / result.seconds:.1f}",
                    f"{result.hit_rate:.1%}",
                    f"{result.fraction:.1%}",
                    f"{same}/{len(first.texts)}",
                )
            )
        title = f"{workload}: {first.programs} programs, {first.calls} calls, {first.prompt_tokens} prompt tokens"
        report.grid(title, HEADINGS, cells)


def summary(results: Sequence[Result]) -> None:
    """Means over the workloads."""
    by_workload = grouped(results)
    names = list(dict.fromkeys(result.variant for result in results))
    cells = []
    for name in names:
        rows = [by_variant[name] for by_variant in by_workload.values()]
        ratios = [
            row.rate / bare.rate for row in rows if (bare := by_workload[row.workload].get("no-cache")) is not None
        ]
        speed = f"{statistics.geometric_mean(ratios):.2f} x" if ratios else ""
        hits, optimum = (statistics.fmean(getattr(row, key) for row in rows) for key in ("hit_rate", "fraction"))
        cells.append((name, speed, f"{hits:.1%}", f"{optimum:.1%}"))
    report.grid(f"mean of {len(by_workload)} workloads", ("", "vs no-cache", "hit rate", "of optimum"), cells)


def draw(results: Sequence[Result], path: Path) -> None:
    """Bars: throughput of each variant as a share of the first one's, and hit rates beside the optimum."""
    from matplotlib.figure import Figure

    by_workload = grouped(results)
    variants = list(dict.fromkeys(result.variant for result in results))
    figure = Figure(figsize=(max(9.0, 1.3 * len(by_workload)), 8), layout="constrained")
    speed, hits = figure.subplots(2, 1)
    first = variants[0]
    _bars(speed, by_workload, variants, lambda row, rows: row.rate / rows[first].rate)
    speed.set(ylabel=f"throughput, {first} = 1")
    speed.legend(ncols=4, fontsize=8)
    _bars(hits, by_workload, variants, lambda row, rows: row.hit_rate)
    for place, rows in enumerate(by_workload.values()):
        hits.hlines(rows[first].optimal, place - 0.45, place + 0.45, color="black", linewidth=1.2)
    hits.set(ylabel="hit rate (line: optimum)", ylim=(min(0.0, hits.get_ylim()[0]), 1.0))
    figure.savefig(path, dpi=130)


def _bars(axes: Any, by_workload: dict[str, dict[str, Result]], variants: Sequence[str], height: Any) -> None:
    width = 0.86 / len(variants)
    for i, name in enumerate(variants):
        places = [place - 0.43 + (i + 0.5) * width for place in range(len(by_workload))]
        axes.bar(places, [height(rows[name], rows) for rows in by_workload.values()], width, label=name)
    axes.set_xticks(range(len(by_workload)), list(by_workload), rotation=20, ha="right", fontsize=8)
