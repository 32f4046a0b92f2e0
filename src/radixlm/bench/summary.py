"""This module owns what a load's records say in numbers: distributions, throughput, goodput."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from radixlm.base.errors import BadRequest
from radixlm.bench.loadgen import Record, Run

PERCENTILES = (90, 99)
#: Distributions of a `Summary`, and their names in saved results.
LATENCIES = {
    "ttft": "ttft",
    "ttft_sent": "ttft_sent",
    "tpot": "tpot",
    "itl": "itl",
    "e2e": "e2el",
    "e2e_sent": "e2el_sent",
}
#: Names of `--slo`, and the synonyms other load generators use.
SLO_NAMES = {"ttft": "ttft", "tpot": "tpot", "e2e": "e2e", "e2el": "e2e"}


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of some measured values, in their unit. `std` is that of the population."""

    count: int
    mean: float
    median: float
    std: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution | None:
        """None if there are no values."""
        ordered = sorted(values)
        if not ordered:
            return None
        mean = math.fsum(ordered) / len(ordered)
        std = math.sqrt(math.fsum((value - mean) ** 2 for value in ordered) / len(ordered))
        p90, p99 = (percentile(ordered, at) for at in PERCENTILES)
        return cls(len(ordered), mean, percentile(ordered, 50), std, p90, p99, ordered[-1])


def percentile(ordered: Sequence[float], at: float) -> float:
    """The `at`-th percentile of ascending values, interpolated between neighbours (R's type 7, numpy's default)."""
    place = (len(ordered) - 1) * at / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True, slots=True)
class Summary:
    """A load in numbers. Tokens are as the server counted them; rates are per second; latencies are milliseconds.

    Attributes:
        short: answers with fewer tokens than asked for.
        concurrency: requests in flight, on average.
        late_ms: how late the generator itself sent a request, at worst (ms). Large: it was too slow for the rate.
        ttft, e2e: from when a request was due to its first token, and to its end.
        ttft_sent, e2e_sent: the same from when it was sent.
        tpot: (last token - first token) / (output tokens - 1) of each request of two tokens or more.
        itl: gaps between consecutive pieces of an answer; a piece is one token unless the server bundles them.
        goodput: requests a second that met every objective; None without objectives.
    """

    completed: int
    failed: int
    short: int
    seconds: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    request_throughput: float
    input_throughput: float
    output_throughput: float
    total_throughput: float
    concurrency: float
    late_ms: float
    tokens_per_piece: float
    ttft: Distribution | None
    ttft_sent: Distribution | None
    tpot: Distribution | None
    itl: Distribution | None
    e2e: Distribution | None
    e2e_sent: Distribution | None
    goodput: float | None

    def flat(self) -> dict[str, float | int | None]:
        """One level of names, `mean_ttft_ms` and so on, as other load generators save them."""
        flat: dict[str, float | int | None] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in LATENCIES:
                flat[field.name] = value
                continue
            for statistic in dataclasses.fields(Distribution):
                if statistic.name != "count":
                    name = f"{statistic.name}_{LATENCIES[field.name]}_ms"
                    flat[name] = getattr(value, statistic.name) if value else None
        return flat


def summarise(run: Run, slo: Mapping[str, float] | None = None, bound: int | None = None) -> Summary:
    """What the records of a run say.

    Args:
        slo: milliseconds that `ttft`, `tpot`, `e2e` of a good request may take.
        bound: the run's bound on concurrency; requests it held back were not sent late by the generator.
    """
    done = [record for record in run.records if record.error is None]
    seconds = run.seconds or math.nan
    tokens_in, tokens_out = sum(r.input_tokens for r in done), sum(r.output_tokens for r in done)
    pieces = sum(len(r.stamps) for r in done)
    return Summary(
        completed=len(done),
        failed=len(run.records) - len(done),
        short=sum(record.output_tokens < record.wanted for record in done),
        seconds=run.seconds,
        input_tokens=tokens_in,
        output_tokens=tokens_out,
        cached_tokens=sum(record.cached_tokens for record in done),
        request_throughput=len(done) / seconds,
        input_throughput=tokens_in / seconds,
        output_throughput=tokens_out / seconds,
        total_throughput=(tokens_in + tokens_out) / seconds,
        concurrency=sum(record.end - record.sent for record in done) / seconds,
        late_ms=0.0 if bound else max(((r.sent - r.due) * 1e3 for r in run.records), default=0.0),
        tokens_per_piece=tokens_out / pieces if pieces else math.nan,
        ttft=Distribution.of(_ttft(record) for record in done),
        ttft_sent=Distribution.of((record.first - record.sent) * 1e3 for record in done),
        tpot=Distribution.of(tpot for record in done if (tpot := _tpot(record)) is not None),
        itl=Distribution.of((b - a) * 1e3 for r in done for a, b in itertools.pairwise(r.stamps)),
        e2e=Distribution.of(_e2e(record) for record in done),
        e2e_sent=Distribution.of((record.end - record.sent) * 1e3 for record in done),
        goodput=sum(_good(record, slo) for record in done) / seconds if slo else None,
    )


def _ttft(record: Record) -> float:
    return (record.first - record.due) * 1e3


def _e2e(record: Record) -> float:
    return (record.end - record.due) * 1e3


def _tpot(record: Record) -> float | None:
    if record.output_tokens < 2:
        return None
    return (record.last - record.first) * 1e3 / (record.output_tokens - 1)


def _good(record: Record, slo: Mapping[str, float]) -> bool:
    measured = {"ttft": _ttft(record), "tpot": _tpot(record) or 0.0, "e2e": _e2e(record)}
    return all(measured[name] <= limit for name, limit in slo.items())


def parse_slo(words: Sequence[str]) -> dict[str, float]:
    """`["ttft:500", "tpot:50"]` -> milliseconds by name.

    Raises:
        BadRequest: an unknown name, or a limit that is not a positive number.
    """
    slo = {}
    for word in words:
        name, _, text = word.partition(":")
        try:
            limit = float(text)
        except ValueError:
            limit = math.nan
        if name not in SLO_NAMES or not limit > 0:
            raise BadRequest(f"{word!r} is no objective; write ttft:MS, tpot:MS or e2e:MS", param="slo")
        slo[SLO_NAMES[name]] = limit
    return slo
