"""This module owns how a load is told: the table on the terminal and the JSON file."""

from __future__ import annotations

import platform
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from radixlm.bench.loadgen import Record, Run
from radixlm.bench.summary import Distribution, Summary

PACKAGES = ("radixlm", "torch", "transformers", "numpy", "msgspec")


# ---- the table


def rows(summary: Summary) -> list[tuple[str, str]]:
    """(label, value) of everything but the latencies."""
    share = summary.cached_tokens / summary.input_tokens if summary.input_tokens else 0.0
    listed = [
        ("requests completed", f"{summary.completed}"),
        ("requests failed", f"{summary.failed}"),
        ("duration", f"{summary.seconds:.2f} s"),
        ("input tokens", f"{summary.input_tokens}"),
        ("  of them cached", f"{summary.cached_tokens} ({share:.1%})"),
        ("output tokens", f"{summary.output_tokens}"),
        ("request throughput", f"{summary.request_throughput:.2f} req/s"),
        ("input throughput", f"{summary.input_throughput:.1f} tok/s"),
        ("output throughput", f"{summary.output_throughput:.1f} tok/s"),
        ("total throughput", f"{summary.total_throughput:.1f} tok/s"),
        ("concurrency, mean", f"{summary.concurrency:.1f}"),
    ]
    if summary.goodput is not None:
        listed.append(("goodput", f"{summary.goodput:.2f} req/s"))
    if summary.short:
        listed.append(("answers shorter than asked", f"{summary.short}"))
    if summary.tokens_per_piece > 1.05:
        listed.append(("tokens in a piece", f"{summary.tokens_per_piece:.2f}"))
    if summary.late_ms > 50:
        listed.append(("sent late, at worst", f"{summary.late_ms:.0f} ms: the generator cannot keep this rate"))
    return listed


def latencies(summary: Summary) -> list[tuple[str, Distribution]]:
    """(label, distribution in ms). Times from sending are listed only where they differ from those from being due."""
    measured = [("TTFT", summary.ttft), ("TPOT", summary.tpot), ("ITL", summary.itl), ("E2E", summary.e2e)]
    if summary.e2e and summary.e2e_sent and summary.e2e.mean - summary.e2e_sent.mean > 0.05 * summary.e2e.mean:
        measured += [("TTFT from sending", summary.ttft_sent), ("E2E from sending", summary.e2e_sent)]
    return [(label, distribution) for label, distribution in measured if distribution is not None]


def show(title: str, summary: Summary, errors: Mapping[str, int]) -> None:
    """Print the result of a load."""
    grid(title, (), rows(summary))
    measured = [
        (label, *(f"{value:.2f}" for value in (d.mean, d.median, d.p90, d.p99, d.std, d.max)))
        for label, d in latencies(summary)
    ]
    grid("", ("ms", "mean", "median", "p90", "p99", "std", "max"), measured)
    for message, count in errors.items():
        print(f"{count} x {message}")


def grid(title: str, headings: Sequence[str], cells: Iterable[Sequence[str]]) -> None:
    """Print rows of cells, the first column to the left and the others to the right. Never folded or cut."""
    rows = list(cells)
    lines = [headings, *rows] if headings else rows
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(f"\n{title}" if title else "")
    for number, line in enumerate(lines):
        first, *others = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join((first, *(cell.strip().rjust(len(cell)) for cell in others))).rstrip())
        if headings and number == 0:
            print("-" * (sum(widths) + 2 * len(widths) - 2))


# ---- the file


def errors_of(run: Run) -> dict[str, int]:
    """How often each error came, the most frequent first."""
    return dict(Counter(record.error for record in run.records if record.error is not None).most_common())


def document(settings: Mapping[str, Any], kind: str, argv: Sequence[str]) -> dict[str, Any]:
    """A result with what is needed to read it later and to get it again, as JSON types.

    Args:
        settings: the figures, and whatever decided them, the seed included.
        kind, argv: of the benchmark, as they were typed; keys among them are starred.
    """
    return {
        "command": command(["radixlm", "bench", kind, *argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        **settings,
    }


def load_document(run: Run, summary: Summary, *, detailed: bool) -> dict[str, Any]:
    """The figures of a load. `detailed`: with the time of every piece of every answer."""
    return {
        **summary.flat(),
        "errors": errors_of(run),
        "requests": [_row(record, detailed) for record in run.records],
    }


def command(argv: Sequence[str]) -> str:
    """A command line as it could be typed again, without its secrets."""
    words: list[str] = []
    for word in argv:
        name, equals, _ = word.partition("=")
        if name.replace("_", "-").endswith("api-key") and equals:
            word = f"{name}=***"
        elif words and words[-1].replace("_", "-").endswith("api-key"):
            word = "***"
        words.append(word)
    return shlex.join(words)


def versions() -> dict[str, str]:
    """Of Python, of the system and of the packages that matter, as installed."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _row(record: Record, detailed: bool) -> dict[str, Any]:
    row: dict[str, Any] = {
        "session": record.session,
        "turn": record.turn,
        "due_s": round(record.due, 6),
        "sent_s": round(record.sent, 6),
        "first_s": round(record.first, 6) if record.error is None else None,
        "end_s": round(record.end, 6),
        "input_tokens": record.input_tokens,
        "output_tokens": record.output_tokens,
        "cached_tokens": record.cached_tokens,
        "error": record.error,
    }
    if detailed:
        row["stamps_s"] = [round(stamp, 6) for stamp in record.stamps]
    return row


def save(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON. Values that are not finite become null, as JSON has none."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
