"""This module owns the outermost layers of the app: request ids, the last catch, the door shut while starting."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from radixlm.api import errors
from radixlm.api.errors import route_path
from radixlm.api.hub import Hub, Stage
from radixlm.observe.metrics import Metrics

#: A client's own request id is echoed if it looks like one; anything else could forge log lines or headers.
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

#: Counted for requests whose client left before there was an answer.
CLIENT_GONE = 499

log = logging.getLogger("radixlm.api")


class Edge:
    """Gives every answer an `x-request-id`, counts it, and turns what nobody caught into a 500 of the usual shape.

    Args:
        endpoints: handler -> its route as written in the table, for the counts.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, endpoints: Mapping[Any, str]) -> None:
        self._app = app
        self._metrics = metrics
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope).get("x-request-id"))
        scope.setdefault("state", {})["request_id"] = request_id
        status = 0
        begin = time.monotonic()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            log.exception("request %s: %s %s failed", request_id, scope["method"], route_path(scope))
            if not status:
                await errors.response(errors.internal(), scope)(scope, receive, send_with_id)
        finally:
            endpoint = self._endpoints.get(scope.get("endpoint"), "none")
            self._metrics.http(endpoint, scope["method"], status or CLIENT_GONE, time.monotonic() - begin)


def _request_id(offered: str | None) -> str:
    if offered is not None and REQUEST_ID.fullmatch(offered):
        return offered
    return uuid.uuid4().hex


class Gate:
    """Answers 503 to everything while the engine starts, but for `/live`, which says that this process works."""

    def __init__(self, app: ASGIApp, hub: Hub) -> None:
        self._app = app
        self._hub = hub

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        starting = self._hub.stage in (Stage.STARTING, Stage.WARMING)
        if scope["type"] == "http" and starting and route_path(scope) != "/live":
            await errors.response(self._hub.refusal(), scope)(scope, receive, send)
            return
        await self._app(scope, receive, send)
