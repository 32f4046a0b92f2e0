"""The shapes that errors have on the wire."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]


def error_of(body: Any) -> Json:
    """The error in a body of one of the three shapes there are: OpenAI's, Anthropic's, Ollama's."""
    if body.keys() == {"error"} and isinstance(body["error"], str):
        return {"message": body["error"], "type": None, "param": None}
    if body.keys() == {"type", "error", "request_id"}:
        assert body["type"] == "error" and body["error"].keys() == {"type", "message"}, body
        assert body["request_id"]
        return {**body["error"], "param": None}
    assert body.keys() == {"error"} and body["error"].keys() == {"message", "type", "param", "code"}, body
    found: Json = body["error"]
    return found
