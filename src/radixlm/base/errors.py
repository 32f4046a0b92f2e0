"""This module owns the error tree: one class per kind of failure, each with a stable code and HTTP status.

RadixError                 anything we raise on purpose
|-- BadRequest     400     the caller's input is wrong; `param` names the field
|   `-- ContextLengthExceeded
|-- Unauthorized   401
|-- Forbidden      403
|-- NotFound       404
|-- Conflict       409
|-- TooLarge       413
|-- QueueFull      429     the waiting queue is at its limit; retry later
|-- Internal       500     our bug, or a number the model made that is not one
|-- NotServed      501     a feature this build does not have
|-- Unavailable    503     starting, draining, or the engine died
|-- TimedOut       504     a limit in time ran out
`-- StartupError           the server cannot start; printed as one line, no traceback
"""

from __future__ import annotations


class RadixError(Exception):
    """A failure with a reason for the reader: what happened, to which input, what to do."""

    status = 500
    code = "internal_error"
    kind = "internal_error"  # the `type` of OpenAI's error body

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after: float = 0.0
    ) -> None:
        """
        Args:
            retry_after: seconds after which it is worth trying again; 0 where nobody can tell.
        """
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after
        if code is not None:
            self.code = code


class BadRequest(RadixError):
    status, code, kind = 400, "invalid_request", "invalid_request_error"


class ContextLengthExceeded(BadRequest):
    code = "context_length_exceeded"


class Unauthorized(RadixError):
    status, code, kind = 401, "invalid_api_key", "authentication_error"


class Forbidden(RadixError):
    status, code, kind = 403, "forbidden", "permission_error"


class NotFound(RadixError):
    status, code, kind = 404, "not_found", "not_found_error"


class MethodNotAllowed(RadixError):
    status, code, kind = 405, "method_not_allowed", "invalid_request_error"


class Conflict(RadixError):
    status, code, kind = 409, "conflict", "conflict_error"


class TooLarge(RadixError):
    status, code, kind = 413, "request_too_large", "invalid_request_error"


class QueueFull(RadixError):
    status, code, kind = 429, "queue_full", "rate_limit_error"


class Internal(RadixError):
    pass


class NotServed(RadixError):
    status, code, kind = 501, "not_served", "not_supported_error"


class Unavailable(RadixError):
    status, code, kind = 503, "unavailable", "service_unavailable_error"


class TimedOut(RadixError):
    status, code, kind = 504, "timeout", "timeout_error"


class StartupError(RadixError):
    """The server or engine cannot start. The command line prints the message alone and exits with status 2."""

    code = "startup_error"


def by_status(
    status: int, message: str, code: str | None = None, param: str | None = None, retry_after: float = 0.0
) -> RadixError:
    """Rebuild an error that crossed a process boundary as (status, message, code, param, retry_after)."""
    kinds: tuple[type[RadixError], ...] = (
        BadRequest, Unauthorized, Forbidden, NotFound, MethodNotAllowed, Conflict, TooLarge,
        QueueFull, NotServed, Unavailable, TimedOut,
    )  # fmt: skip
    for kind in kinds:
        if kind.status == status:
            return kind(message, param=param, code=code, retry_after=retry_after)
    return Internal(message, code=code)
