"""Log lines and metrics, read back the way their readers do."""

from __future__ import annotations

import io
import json
import logging
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import parser
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import parser as openmetrics

from radixlm.observe import log as observe_log
from radixlm.observe.metrics import MAX_ENDPOINTS, Metrics
from radixlm.wire.messages import Stats

# ---- log


@pytest.fixture
def clean_logger() -> Iterator[None]:
    logger = logging.getLogger("radixlm")
    before = (list(logger.handlers), logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.level, logger.propagate = before


def lines(
    form: str, level: str = "info", color: bool | None = None, role: str = ""
) -> tuple[io.StringIO, logging.Logger]:
    stream = io.StringIO()
    observe_log.setup(level, form, role=role, color=color, stream=stream)
    return stream, logging.getLogger("radixlm.engine")


@pytest.mark.usefixtures("clean_logger")
class TestLog:
    def test_text_is_aligned_and_carries_fields(self) -> None:
        stream, log = lines("text")
        log.info("finished", extra={"rid": "abc", "seconds": 1.23456789, "note": "two words"})
        log.warning("slow")
        first, second = stream.getvalue().splitlines()
        head = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} "
        assert re.fullmatch(head + r'INFO    engine   finished  rid=abc seconds=1.23457 note="two words"', first)
        assert re.fullmatch(head + r"WARNING engine   slow", second)

    def test_json_is_one_strict_object_a_line(self) -> None:
        stream, log = lines("json", role="detok")
        log.info("finished %d", 7, extra={"rid": 'a"\n', "rate": math.nan, "level": "not this", "where": object()})
        try:
            raise ValueError("broken\nthing")
        except ValueError:
            log.exception("failed")
        entries = [json.loads(line, parse_constant=pytest.fail) for line in stream.getvalue().splitlines()]
        assert [(e["level"], e["logger"], e["role"], e["message"]) for e in entries] == [
            ("info", "radixlm.engine", "detok", "finished 7"),
            ("error", "radixlm.engine", "detok", "failed"),
        ]
        assert entries[0]["rid"] == 'a"\n'
        assert entries[0]["rate"] == "nan"
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", entries[0]["time"])
        assert "ValueError: broken" in entries[1]["exception"]

    @pytest.mark.parametrize("form", ["text", "json"])
    def test_what_clients_wrote_is_not_logged(self, form: str) -> None:
        stream, log = lines(form)
        log.info("submitted", extra=dict.fromkeys(observe_log.PRIVATE, "very secret words") | {"rid": "r1"})
        assert "secret" not in stream.getvalue()
        assert "<17>" in stream.getvalue()
        assert "r1" in stream.getvalue()

    def test_levels_hide_what_is_less_severe(self) -> None:
        for level, shown in (("debug", 4), ("info", 3), ("warning", 2), ("error", 1)):
            stream, log = lines("text", level)
            for method in (log.debug, log.info, log.warning, log.error):
                method("x")
            assert len(stream.getvalue().splitlines()) == shown

    def test_colour_is_for_terminals_or_on_demand(self) -> None:
        class Terminal(io.StringIO):
            def isatty(self) -> bool:
                return True

        for color, terminal, coloured in (
            (None, True, True),
            (None, False, False),
            (False, True, False),
            (True, False, True),
        ):
            stream = Terminal() if terminal else io.StringIO()
            observe_log.setup(color=color, stream=stream)
            logging.getLogger("radixlm.api").error("x", extra={"rid": "r"})
            assert ("\x1b[" in stream.getvalue()) == coloured
            bare = re.sub(r"\x1b\[[\d;]*m", "", stream.getvalue())
            assert bare.endswith("ERROR   api      x  rid=r\n")

    def test_setting_up_again_replaces(self) -> None:
        first, _ = lines("text")
        second, log = lines("json")
        log.info("once")
        assert first.getvalue() == ""
        assert len(second.getvalue().splitlines()) == 1

    @settings(max_examples=100)
    @given(message=st.text(max_size=30), value=st.text(max_size=30))
    def test_no_text_makes_a_second_line_or_a_fake_field(self, message: str, value: str) -> None:
        for form in ("text", "json"):
            stream, log = lines(form)
            log.info("%s", message, extra={"rid": value, "last": 1})
            written = stream.getvalue()
            assert len(written.splitlines()) == 1
            assert written.isascii() or form == "text"
            if form == "json":
                assert json.loads(written)["rid"] == value
            else:
                assert written.endswith(" last=1\n")
                assert "\x1b" not in written
                quoted = re.search(r'rid=("(?:[^"\\]|\\.)*"|[^ "]*) last=1\n\Z', written)
                assert quoted
                assert (json.loads(quoted[1]) if quoted[1].startswith('"') else quoted[1]) == value


# ---- metrics

SNAPSHOT = {
    "running": 3.0, "waiting": 2.0, "prompt_tokens": 100.0, "cached_tokens": 60.0, "queried_tokens": 100.0,
    "generation_tokens": 40.0, "retractions": 1.0, "aborted": 2.0, "finished_stop": 1.0, "finished_length": 1.0,
    "finished_abort": 1.0, "evicted_tokens": 7.0, "pool_total": 100.0, "pool_free": 50.0, "pool_leased": 20.0,
    "pool_pinned": 5.0, "pool_evictable": 25.0, "steps": 9.0, "busy_seconds": 1.5,
}  # fmt: skip


def read(metrics: Metrics) -> dict[str, Metric]:
    body, content_type = metrics.render()
    assert content_type.startswith("text/plain; version=")
    return {family.name: family for family in parser.text_string_to_metric_families(body.decode())}


def value(metrics: Metrics, name: str, **labels: str) -> float:
    """The one sample of this name that has these labels."""
    found = [
        sample.value
        for family in read(metrics).values()
        for sample in family.samples
        if sample.name == f"radixlm:{name}" and labels.items() <= sample.labels.items()
    ]
    assert len(found) == 1, (name, labels, found)
    return float(found[0])


def test_every_family_is_prefixed_described_and_labelled() -> None:
    metrics = Metrics("m")
    metrics.engine(SNAPSHOT)
    metrics.http("/generate", "POST", 200, 0.5)
    metrics.started({"load": 1.0})
    for name, family in read(metrics).items():
        assert name.startswith("radixlm:")
        assert family.documentation
        assert family.type in ("counter", "gauge", "histogram")
        for sample in family.samples:
            assert sample.labels["model_name"] == "m"
            assert not sample.name.endswith("_created")
            assert math.isfinite(sample.value)


def test_the_names_that_dashboards_know_are_there_from_the_start() -> None:
    samples = {sample.name for family in read(Metrics("m")).values() for sample in family.samples}
    names = [
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "kv_cache_tokens",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "prompt_tokens_total",
        "prompt_tokens_cached_total",
        "generation_tokens_total",
        "request_success_total",
        "num_preemptions_total",
        "num_aborted_requests_total",
        "evicted_tokens_total",
        "engine_up",
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket",
        "e2e_request_latency_seconds_bucket",
        "request_queue_time_seconds_bucket",
        "request_prefill_time_seconds_bucket",
        "request_decode_time_seconds_bucket",
        "request_time_per_output_token_seconds_bucket",
    ]
    assert {f"radixlm:{name}" for name in names} <= samples


def test_openmetrics_is_served_when_asked_for() -> None:
    metrics = Metrics("m")
    metrics.engine(SNAPSHOT)
    metrics.finished(Stats(5, 3, 0, 0, 1.0, 2.0, 3.0, 4.0), "stop")
    body, content_type = metrics.render("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert list(openmetrics.text_string_to_metric_families(body.decode()))


def test_label_values_of_any_text_parse() -> None:
    metrics = Metrics('a "quoted" \\ name\nof a mödel')
    assert value(metrics, "engine_up", model_name='a "quoted" \\ name\nof a mödel') == 0


def test_the_engine_figures() -> None:
    metrics = Metrics("m")
    metrics.engine(SNAPSHOT | {"unknown": 1.0})
    assert value(metrics, "num_requests_running") == 3
    assert value(metrics, "num_requests_waiting") == 2
    assert value(metrics, "kv_cache_usage_perc") == 0.25  # what could be evicted is not in use
    assert value(metrics, "kv_cache_tokens", owner="evictable") == 25
    assert value(metrics, "prefix_cache_hits_total") == value(metrics, "prompt_tokens_cached_total") == 60
    assert value(metrics, "num_preemptions_total") == 1
    assert value(metrics, "engine_busy_seconds_total") == 1.5
    metrics.engine({"running": 0.0})
    assert value(metrics, "num_requests_running") == 0
    assert value(metrics, "num_requests_waiting") == 2


def test_gauges_fall_to_zero_when_the_engine_is_gone() -> None:
    metrics = Metrics("m")
    metrics.engine(SNAPSHOT)
    assert value(metrics, "engine_up") == 1
    metrics.up(False)
    for name in ("engine_up", "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert value(metrics, name) == 0
    assert value(metrics, "generation_tokens_total") == 40


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 50)), max_size=12))
def test_counters_never_fall_and_lose_nothing_over_restarts(steps: list[tuple[bool, int]]) -> None:
    metrics = Metrics("m")
    total = engine = 0
    for restarts, tokens in steps:
        # A restart shows as a smaller total; one that gets past the old total before it is seen cannot be told.
        if restarts and tokens < engine:
            engine = tokens
        else:
            engine += tokens
        total += tokens
        metrics.engine({"generation_tokens": float(engine)})
        assert value(metrics, "generation_tokens_total") == total


def test_a_finished_request_is_measured() -> None:
    metrics = Metrics("m")
    metrics.finished(Stats(10, 5, 4, 0, 100.0, 100.5, 102.0, 104.0), "length")
    for name, seconds in (
        ("request_queue_time_seconds", 0.5),
        ("request_prefill_time_seconds", 1.5),
        ("time_to_first_token_seconds", 2.0),
        ("request_decode_time_seconds", 2.0),
        ("e2e_request_latency_seconds", 4.0),
        ("request_time_per_output_token_seconds", 0.5),
        ("request_prompt_tokens", 10),
        ("request_generation_tokens", 5),
    ):
        assert value(metrics, f"{name}_count") == 1
        assert value(metrics, f"{name}_sum") == seconds
    assert value(metrics, "request_success_total", finished_reason="length") == 1
    assert value(metrics, "request_success_total", finished_reason="stop") == 0


def test_what_never_happened_is_not_measured() -> None:
    metrics = Metrics("m")
    metrics.finished(Stats(10, 0, 0, 0, 100.0, 0.0, 0.0, 103.0), "abort")  # cancelled while it waited
    metrics.finished(None, "error")
    metrics.finished(Stats(10, 2, 0, 0, 100.0, 99.0, 98.0, 97.0), "a reason nobody knows")  # the clock was set back
    assert value(metrics, "time_to_first_token_seconds_count") == 1
    assert value(metrics, "time_to_first_token_seconds_sum") == 0
    assert value(metrics, "e2e_request_latency_seconds_count") == 2
    assert value(metrics, "request_success_total", finished_reason="error") == 2


def test_gaps_count_once_a_token() -> None:
    metrics = Metrics("m")
    metrics.streamed(0.3, 3)
    metrics.streamed(0.5, 1)
    assert value(metrics, "inter_token_latency_seconds_count") == 4
    assert value(metrics, "inter_token_latency_seconds_sum") == pytest.approx(0.8)


def test_series_stay_few_whatever_clients_ask_for() -> None:
    metrics = Metrics("m")
    for i in range(3 * MAX_ENDPOINTS):
        metrics.http(f"/probe/{i}", f"VERB{i}", 404, 0.01)
    metrics.http("/probe/1", "GET", 200, 0.01)
    samples: list[Any] = read(metrics)["radixlm:http_requests"].samples
    assert len({sample.labels["endpoint"] for sample in samples}) == MAX_ENDPOINTS + 1
    assert {sample.labels["method"] for sample in samples} == {"GET", "other"}
    assert sum(sample.value for sample in samples) == 3 * MAX_ENDPOINTS + 1


def test_two_registries_do_not_meet() -> None:
    one, two = Metrics("m"), Metrics("m")
    one.engine(SNAPSHOT)
    assert value(two, "num_requests_running") == 0
