"""ABRT and METR: a client that leaves ends its work, an abort ends it by name, and the figures say so."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.live import Refused, Server, deltas, finishes, together, until
from support.servers import ROWS
from support.words import CTX, ids

COMPLETIONS = "/v1/completions"


def held(server: Server) -> float:
    """Tokens of the pool that sequences hold."""
    figures = server.figures()
    return float(figures["pool_leased"] + figures["pool_pinned"])


def check_quiet(server: Server) -> None:
    """Nothing runs, nothing is held, and no token is generated any more."""
    server.check_settles(3.0)
    made = server.figures()["generation_tokens"]
    time.sleep(0.3)
    assert server.figures()["generation_tokens"] == made
    metrics = server.metrics()
    assert metrics["num_requests_running"] == metrics["num_requests_waiting"] == 0
    assert metrics["kv_cache_usage_perc"] == 0


def test_abrt_1_a_dropped_stream_stops_the_work(plain: Server) -> None:
    before = plain.metrics()
    body = {"model": plain.model, "prompt": "Say it:", "max_tokens": 2000, "temperature": 0, "ignore_eos": True}
    with plain.open(COMPLETIONS, body) as events:
        reading = iter(events)
        next(reading)
        next(reading)
        assert held(plain) > 0
    check_quiet(plain)
    after = plain.metrics()
    assert after["num_aborted_requests_total"] == before["num_aborted_requests_total"] + 1
    assert after["generation_tokens_total"] - before["generation_tokens_total"] < 2000


def test_abrt_1_a_dropped_plain_request_too(plain: Server) -> None:
    before = plain.figures()["aborted"]
    body = {"model": plain.model, "prompt": "Say it:", "max_tokens": 2000, "temperature": 0, "ignore_eos": True}
    with plain.send(COMPLETIONS, {**body, "n": 2}):
        until(lambda: plain.figures()["running"] == 2, what="the request's start")
    check_quiet(plain)
    assert plain.figures()["aborted"] == before + 2


def test_abrt_2_drop_while_queued(narrow: Server) -> None:
    asked = {"max_tokens": 400, "ignore_eos": True}
    fillers = [partial(narrow.complete_stream, prompt=f"Filler {i}", **asked) for i in range(ROWS)]
    before = narrow.figures()

    def drop_queued() -> list[dict[str, Any]]:
        until(lambda: narrow.figures()["running"] == ROWS, what="full rows")
        body = {"model": narrow.model, "max_tokens": 500, "stream": True, "ignore_eos": True}
        queued = [narrow.send(COMPLETIONS, {**body, "prompt": ids(CTX // 2, 50 * i)}) for i in range(10)]
        until(lambda: narrow.figures()["waiting"] == 10, what="ten waiting requests")
        for socket in queued:
            socket.close()
        until(lambda: narrow.figures()["waiting"] == 0, what="an empty queue")
        assert narrow.figures()["running"] == ROWS, "the rows were to be full until the queue was empty"
        return []

    calls: list[Callable[[], list[dict[str, Any]]]] = [*fillers, drop_queued]
    *streams, _ = together(calls)
    check_quiet(narrow)
    after = narrow.figures()
    assert all(finishes(chunks) == ["length"] for chunks in streams)
    assert after["generation_tokens"] - before["generation_tokens"] == 400 * ROWS, "a dropped request decoded"
    assert after["aborted"] - before["aborted"] == 10


def test_abrt_2_drop_during_chunked_prefill(narrow: Server) -> None:
    before = narrow.figures()
    body = {"model": narrow.model, "max_tokens": 500, "stream": True, "ignore_eos": True}
    # Prompts that share nothing: each takes 128 steps of 8 tokens.
    sockets = [narrow.send(COMPLETIONS, {**body, "prompt": ids(CTX // 2, 1000 * i + 7)}) for i in range(5)]
    until(lambda: narrow.figures()["running"] > 0, what="the first prefill")
    for socket in sockets:
        socket.close()
    check_quiet(narrow)
    after = narrow.figures()
    assert after["generation_tokens"] == before["generation_tokens"], "a dropped request decoded"
    assert after["aborted"] - before["aborted"] == 5


def test_abrt_3_abort_by_id(plain: Server) -> None:
    assert plain.ask("/abort_request", {"rid": "nope"}) == {"aborted": 0}
    body = {"model": plain.model, "prompt": "Say it:", "max_tokens": 2000, "temperature": 0, "ignore_eos": True}
    with plain.open(COMPLETIONS, {**body, "rid": "r1", "n": 2}) as events:
        reading = iter(events)
        next(reading)
        assert plain.ask("/abort_request", {"rid": "r1"}) == {"aborted": 2}
        aborted = time.monotonic()
        rest = list(reading)
        assert time.monotonic() - aborted < 1.0
        assert events.error is not None and events.error["code"] == "aborted"
        assert not events.done
        assert all(choice["finish_reason"] is None for chunk in rest for choice in chunk["choices"])
    check_quiet(plain)
    assert plain.ask("/abort_request", {"rid": "r1"}) == {"aborted": 0}
    assert plain.refused("/abort_request", {})["param"] == "rid"


def test_abrt_3_a_plain_request_by_id(plain: Server) -> None:
    body = {"model": plain.model, "prompt": "Say it:", "max_tokens": 2000, "ignore_eos": True, "rid": "r2"}

    def wait() -> int:
        with pytest.raises(Refused) as caught:
            plain.ask(COMPLETIONS, body)
        return caught.value.status

    def abort() -> int:
        until(lambda: plain.figures()["running"] == 1, what="the request's start")
        return int(plain.ask("/abort_request", {"rid": "r2"})["aborted"])

    assert together([wait, abort]) == [499, 1]


def test_metr_1_gauges_fall_back_to_zero(plain: Server) -> None:
    body = {"model": plain.model, "max_tokens": 1500, "stream": True, "ignore_eos": True}
    sockets = [plain.send(COMPLETIONS, {**body, "prompt": f"Stream {i}:"}) for i in range(30)]
    until(lambda: plain.metrics()["num_requests_running"] == 30, what="thirty running streams")
    assert plain.metrics()["kv_cache_usage_perc"] > 0
    for socket in sockets:
        socket.close()
    time.sleep(3.0)
    metrics = plain.metrics()
    assert metrics["num_requests_running"] == metrics["num_requests_waiting"] == metrics["kv_cache_usage_perc"] == 0


def test_metr_2_exposition_and_cache_hits(plain: Server) -> None:
    def samples() -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        families = text_string_to_metric_families(plain.get("/metrics").text)
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in families
            if family.type in ("counter", "histogram")
            for sample in family.samples
        }

    hits = ("radixlm:prefix_cache_hits_total", (("model_name", plain.model),))
    before = samples()
    cached = 0
    for tail in range(5):
        answer = plain.complete(prompt=ids(300) + ids(5, 400 + tail), max_tokens=2, cache_salt="metr")
        cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    after = samples()
    assert cached >= 4 * 300
    assert after[hits] - before[hits] == cached
    assert all(after[name] >= value for name, value in before.items())
    assert not [name for name, _ in after if not name.startswith("radixlm:")]


def test_metr_deltas_of_a_stream_are_counted(plain: Server) -> None:
    before = plain.metrics()
    chunks = plain.complete_stream(prompt="Count:", max_tokens=10, ignore_eos=True)
    after = plain.metrics()
    assert "".join(deltas(chunks))
    assert after["generation_tokens_total"] - before["generation_tokens_total"] == 10
    assert after["time_to_first_token_seconds_count"] - before["time_to_first_token_seconds_count"] == 1
    gaps = after["inter_token_latency_seconds_count"] - before["inter_token_latency_seconds_count"]
    assert 1 <= gaps <= 9, "at most one between two tokens; those that came together with the first have none"
