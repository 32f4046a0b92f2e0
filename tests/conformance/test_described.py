"""Whatever the description of the API allows or forbids: a live server answers it in time, and goes on."""

from __future__ import annotations

import time
from typing import Any

import pytest

from support.described import OPERATIONS, check_operation
from support.live import Server

#: Field that bounds an answer, by route.
LIMITS = {
    "/v1/chat/completions": "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/messages": "max_tokens",
    "/v1/responses": "max_output_tokens",
}

MOST_SECONDS = 20.0


def bounded(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Few tokens, so that what is looked at is the answer and not its length."""
    if path in LIMITS:
        body[LIMITS[path]] = 3
        body.pop("max_completion_tokens", None)
    elif path == "/generate":
        body["sampling_params"] = {"max_new_tokens": 3}
    elif path in ("/api/chat", "/api/generate"):
        body["options"] = {"num_predict": 3}
    if path == "/abort_request":
        body.pop("abort_all", None)
    body.pop("background", None)
    return body


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_whatever_is_described(plain: Server, method: str, path: str) -> None:
    def send(method: str, place: str, body: bytes | None) -> int:
        headers = {"content-type": "application/json"} if body is not None else {}
        begin = time.monotonic()
        response = plain.http.request(method, place, content=body, headers=headers)
        assert time.monotonic() - begin < MOST_SECONDS
        return response.status_code

    check_operation(method, path, 4, send, lambda body: bounded(path, body))
