"""This module owns how an error looks to a client: one JSON shape, its status and headers, on every route."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from radixlm.base.errors import Internal, MethodNotAllowed, NotFound, RadixError, by_status
from radixlm.wire.messages import TextDelta

#: Seconds after which a client may try again, by status.
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
    message = error.message
    if len(message) > LONGEST_MESSAGE:
        message = message[:LONGEST_MESSAGE] + "..."
    return msgspec.json.encode(ErrorBody(ErrorDetail(message, error.kind, error.param, error.code)))


def response(error: RadixError, headers: Mapping[str, str] | None = None) -> Response:
    headers = dict(headers or {})
    if error.status in RETRY_AFTER:
        headers["retry-after"] = RETRY_AFTER[error.status]
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(body(error), error.status, headers, "application/json")


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
        return by_status(delta.fault.status, delta.fault.message, delta.fault.code, delta.fault.param or None)
    if delta.finish is not None and delta.finish.kind == "abort":
        reason = delta.finish.message or "the request was aborted"
        return by_status(503, reason, "shutting_down") if draining else Aborted(reason)
    return None
