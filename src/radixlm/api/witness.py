"""This module owns what is recorded of requests as they pass through the hub: metrics and the log, never their text."""

from __future__ import annotations

import logging

from radixlm.api.hub import Witness
from radixlm.base.request import Request
from radixlm.config.schema import ObserveConfig
from radixlm.observe.metrics import Metrics
from radixlm.wire.messages import TextDelta

log = logging.getLogger("radixlm.requests")


def witnesses(config: ObserveConfig, metrics: Metrics) -> list[Witness]:
    """The witnesses that the configuration asks for."""
    found: list[Witness] = [MetricsWitness(metrics)]
    if config.log_requests:
        found.append(RequestLog())
    return found


class MetricsWitness:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def streamed(self, request: Request, tokens: int, gap: float) -> None:
        self._metrics.streamed(gap, tokens)

    def ended(self, request: Request, last: TextDelta, first: float, now: float) -> None:
        self._metrics.finished(last.stats, how(last))


class RequestLog:
    """One line for each sequence that ended."""

    def streamed(self, request: Request, tokens: int, gap: float) -> None:
        pass

    def ended(self, request: Request, last: TextDelta, first: float, now: float) -> None:
        fields = {
            "rid": request.rid,
            "uid": request.uid,
            "finish": how(last),
            "prompt_tokens": len(request.tokens),
            "cached_tokens": last.stats.cached_tokens if last.stats is not None else 0,
            "completion_tokens": last.completion_tokens,
            "e2e_seconds": round(now - request.arrival, 4),
        }
        if first:
            fields["ttft_seconds"] = round(first - request.arrival, 4)
        if last.fault is not None:
            fields["code"] = last.fault.code
        log.info("request ended", extra=fields)


def how(last: TextDelta) -> str:
    """stop, length, abort or error."""
    return last.finish.kind if last.finish is not None else "error"
