"""This module owns how an error looks to a client: its status, its headers, and a JSON shape.

There is one shape, OpenAI's, on every route but those of a dialect that has its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from radixlm.base.errors import Internal, MethodNotAllowed, NotFound, RadixError, by_status
from radixlm.wire.messages import TextDelta

#: Seconds after which a client may try again, by status, where the error does not know better.
RETRY_AFTER = {429: "1", 503: "5"}

#: A message never grows past this many characters, whatever it quotes.
LONGEST_MESSAGE = 1000


class Aborted(RadixError):
    """The sequence was ended by `/abort_request`. 499 because official clients do not retry it."""

    status, code, kind = 499, "aborted", "aborted_error"


class NotSupported(RadixError):
    """A field this server knows but does not serve; ignoring it would silently change the answer."""

    status, code, kind = 400, "not_supported", "invalid_request_error"


class UnsupportedMediaType(RadixError):
    status, code, kind = 415, "unsupported_media_type", "invalid_request_error"


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


def body(error: RadixError) -> bytes:
    """`{"error": {"message", "type", "param", "code"}}`."""
    return msgspec.json.encode(ErrorBody(ErrorDetail(_message(error), error.kind, error.param, error.code)))


def _message(error: RadixError) -> str:
    message = error.message
    return message if len(message) <= LONGEST_MESSAGE else message[:LONGEST_MESSAGE] + "..."


def anthropic_body(error: RadixError, request_id: str = "") -> bytes:
    """`{"type": "error", "error": {"type", "message"}, "request_id"}`."""
    kind = ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    detail = {"type": kind, "message": _message(error)}
    return msgspec.json.encode({"type": "error", "error": detail, "request_id": request_id or None})


def ollama_body(error: RadixError, request_id: str = "") -> bytes:
    """`{"error": message}`."""
    return msgspec.json.encode({"error": _message(error)})


#: Beginning of a route's path -> shape of its errors: the first that fits.
SHAPES: tuple[tuple[str, Callable[[RadixError, str], bytes]], ...] = (
    ("/v1/messages", anthropic_body),
    ("/api/", ollama_body),
)

ANTHROPIC_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def response(
    error: RadixError, scope: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """
    Args:
        scope: of the request (ASGI): whose route it is, and its id.
    """
    headers = dict(headers or {})
    if error.status in RETRY_AFTER:
        headers["retry-after"] = (
            str(math.ceil(error.retry_after)) if error.retry_after > 0 else RETRY_AFTER[error.status]
        )
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(_shaped(error, scope or {}), error.status, headers, "application/json")


def _shaped(error: RadixError, scope: Mapping[str, Any]) -> bytes:
    path = route_path(scope) if "path" in scope else ""
    for beginning, shape in SHAPES:
        if path.startswith(beginning):
            return shape(error, scope.get("state", {}).get("request_id", ""))
    return body(error)


def route_path(scope: Mapping[str, Any]) -> str:
    """The path as the router sees it: without the prefix that a proxy in front keeps."""
    path: str = scope["path"]
    prefix: str = scope.get("root_path", "")
    if prefix and (path == prefix or path.startswith(prefix + "/")):
        return path[len(prefix) :]
    return path


def from_http(error: HTTPException) -> RadixError:
    """What the router raised, in our words: it knows only unknown routes and wrong methods."""
    if error.status_code == 404:
        return NotFound("there is no such route; GET / lists what there is", code="route_not_found")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        return MethodNotAllowed(f"this route does not take that method; it takes {allowed}")
    return by_status(error.status_code, str(error.detail))


def internal() -> RadixError:
    """What a client sees of a bug: no trace, no path. The log has both, under the request id."""
    return Internal("internal error; the server's log has the details under this request's x-request-id")


def of_delta(delta: TextDelta, *, draining: bool = False) -> RadixError | None:
    """The error that ended a sequence, if one did: a fault, or an abort (503 while the server shuts down)."""
    if delta.fault is not None:
        fault = delta.fault
        return by_status(fault.status, fault.message, fault.code, fault.param or None, fault.retry_after)
    if delta.finish is not None and delta.finish.kind == "abort":
        reason = delta.finish.message or "the request was aborted"
        return by_status(503, reason, "shutting_down") if draining else Aborted(reason)
    return None
