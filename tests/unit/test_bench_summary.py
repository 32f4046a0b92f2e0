"""Numbers of a load: percentiles against numpy, and sums that can be checked by hand."""

from __future__ import annotations

import json
import math
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixlm.base.errors import BadRequest
from radixlm.bench import report
from radixlm.bench.loadgen import Record, Run
from radixlm.bench.plot import histogram, running_steps
from radixlm.bench.summary import Distribution, parse_slo, percentile, summarise

values = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200)


@settings(deadline=None)
@given(values, st.floats(0, 100))
def test_percentile_equals_numpy(sample: list[float], at: float) -> None:
    assert percentile(sorted(sample), at) == pytest.approx(float(np.percentile(sample, at)), rel=1e-9, abs=1e-6)


@settings(deadline=None)
@given(values)
def test_distribution_equals_numpy(sample: list[float]) -> None:
    measured = Distribution.of(sample)
    assert measured is not None
    expected = {
        "mean": np.mean(sample),
        "median": np.median(sample),
        "std": np.std(sample),
        "p90": np.percentile(sample, 90),
        "p99": np.percentile(sample, 99),
        "max": np.max(sample),
    }
    for name, value in expected.items():
        assert getattr(measured, name) == pytest.approx(float(value), rel=1e-6, abs=1e-6), name


def test_no_values() -> None:
    assert Distribution.of([]) is None


def record(due: float, sent: float, stamps: list[float], end: float, **fields: Any) -> Record:
    made = Record(session=0, turn=0, due=due, sent=sent, wanted=fields.pop("wanted", len(stamps)), end=end)
    made.stamps = array("d", stamps)
    made.input_tokens, made.output_tokens = 100, len(stamps)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


RUN = Run(
    [
        record(0.0, 0.0, [1.0, 1.1, 1.3], 1.4, cached_tokens=60),
        record(0.5, 2.0, [3.0], 3.0, wanted=5),
        record(1.0, 1.0, [2.0, 4.0], 4.0, output_tokens=5),  # two pieces of five tokens
        record(1.0, 1.0, [], 1.5, error="boom"),
    ],
    seconds=4.0,
)


def test_summary_of_known_records() -> None:
    summary = summarise(RUN, {"ttft": 1000, "tpot": 500})
    assert (summary.completed, summary.failed, summary.short) == (3, 1, 1)
    assert (summary.input_tokens, summary.output_tokens, summary.cached_tokens) == (300, 9, 60)
    assert summary.request_throughput == 0.75
    assert summary.input_throughput == 75
    assert summary.output_throughput == 2.25
    assert summary.total_throughput == 77.25
    assert summary.concurrency == pytest.approx((1.4 + 1.0 + 3.0) / 4)
    assert summary.late_ms == 1500
    assert summary.tokens_per_piece == 1.5
    assert summary.ttft is not None and summary.ttft_sent is not None and summary.tpot is not None
    assert (summary.ttft.median, summary.ttft.max) == (1000, 2500)  # the second counts from when it was due
    assert summary.ttft_sent.max == 1000
    assert (summary.tpot.count, summary.tpot.mean) == (2, pytest.approx((150 + 500) / 2))
    assert summary.itl is not None and summary.itl.count == 3 and summary.itl.max == 2000
    assert summary.e2e is not None and summary.e2e.mean == pytest.approx((1400 + 2500 + 3000) / 3)
    assert summary.goodput == 2 / 4


def test_lateness_is_not_blamed_on_the_generator_under_a_bound() -> None:
    assert summarise(RUN, bound=2).late_ms == 0


def test_times_from_sending_are_shown_where_they_differ() -> None:
    labels = [label for label, _ in report.latencies(summarise(RUN))]
    assert labels == ["TTFT", "TPOT", "ITL", "E2E", "TTFT from sending", "E2E from sending"]
    prompt = Run([record(0.0, 0.0, [1.0], 1.0)], 1.0)
    assert [label for label, _ in report.latencies(summarise(prompt))] == ["TTFT", "E2E"]


def test_nothing_completed() -> None:
    summary = summarise(Run([record(0, 0, [], 1, error="no")], 1.0), {"ttft": 1})
    assert (summary.completed, summary.ttft, summary.goodput) == (0, None, 0)
    assert summary.flat()["mean_ttft_ms"] is None
    assert summarise(Run([], 0.0)).completed == 0


def test_objectives() -> None:
    assert parse_slo(["ttft:500", "tpot:50.5", "e2el:1e4"]) == {"ttft": 500, "tpot": 50.5, "e2e": 1e4}
    for word in ("ttft", "ttft:", "ttft:-1", "ttft:nan", "latency:5", "ttft:x"):
        with pytest.raises(BadRequest, match="is no objective"):
            parse_slo([word])


def test_document_is_json_and_keeps_no_secret(tmp_path: Path) -> None:
    argv = ["--api-key", "hush", "--seed", "3", "--api_key=hush"]
    content = report.document({"seed": 3, **report.load_document(RUN, summarise(RUN), detailed=True)}, "serve", argv)
    report.save(tmp_path / "r.json", content)
    text = (tmp_path / "r.json").read_text()
    loaded = json.loads(text)
    assert "hush" not in text
    assert loaded["command"] == "radixlm bench serve --api-key '***' --seed 3 '--api_key=***'"
    assert loaded["seed"] == 3 and loaded["completed"] == 3 and loaded["errors"] == {"boom": 1}
    assert loaded["p99_ttft_ms"] == pytest.approx(np.percentile([1000, 2500, 1000], 99))
    assert loaded["requests"][2]["stamps_s"] == [2.0, 4.0]
    assert loaded["requests"][3]["first_s"] is None
    assert loaded["versions"]["msgspec"]
    assert "stamps_s" not in report.load_document(RUN, summarise(RUN), detailed=False)["requests"][0]


def test_numbers_that_json_lacks(tmp_path: Path) -> None:
    report.save(tmp_path / "r.json", {"a": math.nan, "b": math.inf, "c": 1.5})
    assert json.loads((tmp_path / "r.json").read_text()) == {"a": None, "b": None, "c": 1.5}


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 5)), max_size=50), st.integers(1, 30))
def test_throughput_over_time_keeps_every_token(points: list[tuple[float, float]], bins: int) -> None:
    rates = histogram([at for at, _ in points], [weight for _, weight in points], 10.0, bins)
    assert sum(rates) * 10.0 / bins == pytest.approx(sum(weight for _, weight in points), abs=1e-9)


def test_requests_in_flight_over_time() -> None:
    assert running_steps(RUN.records) == ([0.0, 0.0, 1.0, 1.0, 1.4, 1.5, 2.0, 3.0, 4.0], [0, 1, 2, 3, 2, 1, 2, 1, 0])
