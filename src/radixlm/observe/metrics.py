"""This module owns the Prometheus metrics of the api process: its own counts and the engine's figures as last heard.

Base names and units are those dashboards know from other servers, under the prefix `radixlm:`. The only labels are
`model_name` and a few closed sets, so the number of series stays small whatever clients send.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

PREFIX = "radixlm:"

#: Endpoints and methods past these are counted as `other`.
MAX_ENDPOINTS = 64
METHODS = frozenset({"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"})
FINISH_KINDS = ("stop", "length", "abort", "error")

#: Seconds. Dense from a millisecond to a minute, where first tokens fall; then to what long answers take.
LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5,
    10.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
#: Seconds between two tokens.
GAP_BUCKETS = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75,
    1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
#: Tokens of a prompt or an answer.
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 1_000_000)

# Key of the engine's snapshot -> names and meaning here.
_GAUGES = (
    ("running", "num_requests_running", "Sequences in the running batch."),
    ("waiting", "num_requests_waiting", "Sequences that wait to start or to resume."),
)
_COUNTERS = (
    ("prompt_tokens", "prompt_tokens", "Prompt tokens of admitted sequences."),
    ("cached_tokens", "prompt_tokens_cached", "Prompt tokens that came from the prefix cache."),
    ("queried_tokens", "prefix_cache_queries", "Tokens looked up in the prefix cache."),
    ("cached_tokens", "prefix_cache_hits", "Tokens found in the prefix cache."),
    ("generation_tokens", "generation_tokens", "Tokens generated."),
    ("retractions", "num_preemptions", "Times a running sequence was paused to free memory."),
    ("aborted", "num_aborted_requests", "Sequences ended early by their client or a limit."),
    ("evicted_tokens", "evicted_tokens", "Tokens evicted from the prefix cache."),
    ("steps", "engine_steps", "Forward passes."),
    ("jump_forward_tokens", "jump_forward_tokens", "Tokens appended without sampling: their text was forced."),
    ("grammars_compiled", "grammar_compilations", "Grammars compiled."),
    ("grammars_cached", "grammar_cache_hits", "Grammars that were compiled already."),
    ("grammars_refused", "grammar_refusals", "Grammars refused: malformed, not enforceable, or too large."),
    ("grammar_seconds", "grammar_compilation_time_seconds", "Seconds spent compiling grammars."),
    ("busy_seconds", "engine_busy_seconds", "Seconds the engine spent in forward passes."),
)
_OWNERS = ("free", "leased", "pinned", "evictable")


class Ended(Protocol):
    """What is known of a sequence when it ends: `wire.messages.Stats`. Times in seconds, 0 if it never got there."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def completion_tokens(self) -> int: ...
    @property
    def arrived(self) -> float: ...
    @property
    def started(self) -> float: ...
    @property
    def first_token(self) -> float: ...
    @property
    def ended(self) -> float: ...


class Metrics:
    """One registry. Not thread-safe beyond what `prometheus_client` is: the api process calls it from its loop."""

    def __init__(self, model_name: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._model = model_name
        self._engine = _EngineFigures(model_name)
        self._registry.register(self._engine)
        self._endpoints: set[str] = set()

        self._up = self._gauge("engine_up", "1 while the engine answers.")
        self._startup = self._gauge("startup_time_seconds", "Seconds each stage of the start took.", "stage")
        self._finished = self._counter("request_success", "Requests that ended, by why.", "finished_reason")
        for kind in FINISH_KINDS:
            self._finished.labels(model_name, kind)
        self._first = self._seconds("time_to_first_token_seconds", "From arrival to the first token.")
        self._gap = self._seconds("inter_token_latency_seconds", "Between two tokens of a stream.", GAP_BUCKETS)
        self._mean_gap = self._seconds(
            "request_time_per_output_token_seconds", "Mean time between the tokens of a request.", GAP_BUCKETS
        )
        self._whole = self._seconds("e2e_request_latency_seconds", "From arrival to the end.")
        self._queue = self._seconds("request_queue_time_seconds", "From arrival to the first step.")
        self._prefill = self._seconds("request_prefill_time_seconds", "From the first step to the first token.")
        self._decode = self._seconds("request_decode_time_seconds", "From the first token to the end.")
        self._prompt = self._seconds("request_prompt_tokens", "Tokens of a prompt.", TOKEN_BUCKETS)
        self._answer = self._seconds("request_generation_tokens", "Tokens of an answer.", TOKEN_BUCKETS)
        self._http = self._counter("http_requests", "Requests answered.", "endpoint", "method", "status")
        self._http_seconds = Histogram(
            f"{PREFIX}http_request_duration_seconds",
            "From a request to the end of its answer.",
            ("model_name", "endpoint", "method"),
            registry=self._registry,
            buckets=LATENCY_BUCKETS,
        )
        self.up(False)

    def engine(self, snapshot: Mapping[str, float]) -> None:
        """Take the engine's figures. Keys that are missing keep their value; unknown ones are ignored."""
        self._engine.update(snapshot)
        self.up(True)

    def up(self, up: bool) -> None:
        """The engine answers, or does not: then nothing runs or waits."""
        self._up.labels(self._model).set(up)
        if not up:
            self._engine.rest()

    def started(self, timings: Mapping[str, float]) -> None:
        """Stage of the start -> seconds."""
        for stage, seconds in timings.items():
            self._startup.labels(self._model, stage).set(seconds)

    def streamed(self, gap: float, tokens: int) -> None:
        """A stream got `tokens` more, `gap` seconds after the ones before. Not for its first tokens."""
        histogram = self._gap.labels(self._model)
        for _ in range(tokens):
            histogram.observe(gap / tokens)

    def finished(self, stats: Ended | None, finish_kind: str) -> None:
        """A request ended: `finish_kind` is stop, length, abort or error. Times it never got to are left out."""
        self._finished.labels(self._model, finish_kind if finish_kind in FINISH_KINDS else "error").inc()
        if stats is None:
            return
        self._prompt.labels(self._model).observe(stats.prompt_tokens)
        self._answer.labels(self._model).observe(stats.completion_tokens)
        for histogram, begin, end in (
            (self._queue, stats.arrived, stats.started),
            (self._prefill, stats.started, stats.first_token),
            (self._first, stats.arrived, stats.first_token),
            (self._decode, stats.first_token, stats.ended),
            (self._whole, stats.arrived, stats.ended),
        ):
            if begin > 0 and end > 0:  # clocks are those of one host, but may be set back
                histogram.labels(self._model).observe(max(0.0, end - begin))
        if stats.completion_tokens > 1 and stats.first_token > 0:
            mean = (stats.ended - stats.first_token) / (stats.completion_tokens - 1)
            self._mean_gap.labels(self._model).observe(max(0.0, mean))

    def http(self, endpoint: str, method: str, status: int, seconds: float) -> None:
        """A request was answered. `endpoint` is the route as written in the table (`/v1/models/{id}`), not the URL."""
        if endpoint not in self._endpoints:
            if len(self._endpoints) >= MAX_ENDPOINTS:
                endpoint = "other"
            else:
                self._endpoints.add(endpoint)
        method = method if method in METHODS else "other"
        self._http.labels(self._model, endpoint, method, str(status)).inc()
        self._http_seconds.labels(self._model, endpoint, method).observe(seconds)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The exposition and its content type: OpenMetrics if the `Accept` header asks for it, else the text format."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def _gauge(self, name: str, help: str, *labels: str) -> Gauge:
        return Gauge(f"{PREFIX}{name}", help, ("model_name", *labels), registry=self._registry)

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"{PREFIX}{name}", help, ("model_name", *labels), registry=self._registry)

    def _seconds(self, name: str, help: str, buckets: tuple[float, ...] = LATENCY_BUCKETS) -> Histogram:
        histogram = Histogram(f"{PREFIX}{name}", help, ("model_name",), registry=self._registry, buckets=buckets)
        histogram.labels(self._model)  # shown from the start, empty
        return histogram


class _EngineFigures(Collector):
    """The engine's snapshot as metrics."""

    def __init__(self, model_name: str) -> None:
        self._model = model_name
        self._values: dict[str, float] = {}
        self._totals = {key: _Total() for key, _, _ in _COUNTERS}

    def update(self, snapshot: Mapping[str, float]) -> None:
        self._values.update(snapshot)
        for key, total in self._totals.items():
            if key in snapshot:
                total.set(snapshot[key])

    def rest(self) -> None:
        self._values.update(dict.fromkeys(("running", "waiting", "pool_leased", "pool_pinned"), 0.0))

    def collect(self) -> Iterator[Metric]:
        for key, name, help in _GAUGES:
            yield self._family(GaugeMetricFamily, name, help, [((), self._values.get(key, 0.0))])
        held = {owner: self._values.get(f"pool_{owner}", 0.0) for owner in _OWNERS}
        used = (held["leased"] + held["pinned"]) / max(1.0, self._values.get("pool_total", 0.0))
        help = "Share of the KV pool that running sequences hold (0 to 1); what could be evicted is not counted."
        yield self._family(GaugeMetricFamily, "kv_cache_usage_perc", help, [((), used)])
        help = "Tokens of the KV pool by owner: free, leased by a sequence, pinned or evictable in the tree."
        rows = [((owner,), count) for owner, count in held.items()]
        yield self._family(GaugeMetricFamily, "kv_cache_tokens", help, rows, ("owner",))
        for key, name, help in _COUNTERS:
            yield self._family(CounterMetricFamily, name, help, [((), self._totals[key].value)])

    def _family(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        help: str,
        rows: Iterable[tuple[tuple[str, ...], float]],
        labels: tuple[str, ...] = (),
    ) -> Metric:
        family = kind(f"{PREFIX}{name}", help, labels=("model_name", *labels))
        for values, value in rows:
            family.add_metric((self._model, *values), value)
        return family


class _Total:
    """A running total that never falls: when its source starts again from zero, it goes on from where it was."""

    def __init__(self) -> None:
        self._before = 0.0
        self._last = 0.0

    @property
    def value(self) -> float:
        return self._before + self._last

    def set(self, total: float) -> None:
        if total < self._last:
            self._before += self._last
        self._last = total
