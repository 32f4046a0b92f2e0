"""This module owns the reading of bodies, and the limits on what a client may send: they hold before the work does."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from radixlm.api.errors import UnsupportedMediaType
from radixlm.base.errors import BadRequest, TooLarge
from radixlm.config.schema import LimitsConfig

Json = dict[str, Any]

JSON_TYPES = ("application/json", "text/json")

#: Longest names (rid, cache_salt, user strings that travel the ring), in characters.
LONGEST_NAME = 512


async def read_body(receive: Receive, declared: int | None, limit: int) -> bytes:
    """The whole body. Stops reading as soon as it is known to be too large.

    Args:
        declared: what `Content-Length` says, if anything.

    Raises:
        TooLarge: more than `limit` bytes.
        ClientDisconnect: the client went away first.
    """
    if declared is not None and declared > limit:
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the request body is larger than {limit} bytes (--max-body-bytes)")


async def read_json(request: Request, limits: LimitsConfig) -> Json:
    """The body as a JSON object."""
    check_media_type(request.headers.get("content-type"), from_browser="origin" in request.headers)
    length = request.headers.get("content-length", "")
    declared = int(length) if length.isascii() and length.isdigit() else None
    return parse_json(await read_body(request.receive, declared, limits.max_body_bytes))


def check_media_type(kind: str | None, *, from_browser: bool) -> None:
    """JSON must be called JSON. Without a type it is taken for JSON, but not from a browser.

    A web page may send untyped and form bodies anywhere without asking first (CORS); it must not reach a local server
    so.
    """
    essence = (kind or "").partition(";")[0].strip().lower()
    if essence in JSON_TYPES or essence.endswith("+json") or (not essence and not from_browser):
        return
    raise UnsupportedMediaType("send the body with Content-Type: application/json")


def parse_json(data: bytes) -> Json:
    if not data.strip():
        raise BadRequest("the body is empty; it must be a JSON object")
    try:
        body = msgspec.json.decode(data)
    except msgspec.MsgspecError as error:
        raise BadRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except UnicodeDecodeError:
        raise BadRequest("the body is not valid UTF-8", code="invalid_json") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply", code="invalid_json") from None
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


def check_count(value: int, low: int, high: int, param: str, option: str) -> int:
    """`value` within `[low, high]`, where `option` is the flag that sets `high`."""
    if not low <= value <= high:
        raise BadRequest(f"{param} is {value}; it must be between {low} and {high} (--{option})", param=param)
    return value


def check_sequences(prompts: int, choices: int, limits: LimitsConfig, param: str) -> None:
    """The sequences that one request makes: prompts times choices."""
    if prompts > limits.max_batch_items or prompts * choices > limits.max_batch_items:
        asked = f"{prompts} prompts" + (f" times n = {choices}" if choices > 1 else "")
        raise BadRequest(
            f"{asked} are more sequences than one request may ask for: {limits.max_batch_items} (--max-batch-items)",
            param=param,
        )


def check_name(value: str, param: str) -> str:
    if len(value) > LONGEST_NAME:
        raise BadRequest(f"{param} has {len(value)} characters; {LONGEST_NAME} are allowed", param=param)
    return value
