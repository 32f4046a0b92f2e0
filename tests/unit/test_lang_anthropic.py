"""Programs on Anthropic's Messages API, against a server that speaks it as its documentation has it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

import radixlm as rl

Json = dict[str, Any]


class Service(ThreadingHTTPServer):
    """Answers with a count of the words that it was sent. Keeps the bodies."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[Json] = []
        self.said = ""  # instead of the count
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Service

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        if self.headers["x-api-key"] != "key" or self.headers["anthropic-version"] != "2023-06-01":
            error = {"type": "error", "error": {"type": "authentication_error", "message": "invalid x-api-key"}}
            self._send(401, "application/json", json.dumps(error).encode())
            return
        words = len(json.dumps(body["messages"]).split())
        text = self.server.said or f"{words} words"
        usage = {"input_tokens": words, "cache_read_input_tokens": 3, "output_tokens": 2}
        end = {"stop_reason": "end_turn", "stop_sequence": None}
        if not body.get("stream"):
            answer = {"id": "msg_1", "type": "message", "role": "assistant", "usage": usage, **end}
            content = [{"type": "text", "text": text}]
            self._send(200, "application/json", json.dumps({**answer, "content": content}).encode())
            return
        start: Json = {"type": "message_start", "message": {"id": "msg_1", "content": [], "usage": usage}}
        deltas = [
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": piece}}
            for piece in text
        ]
        events = [
            start,
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
            {"type": "ping"},
            *deltas,
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": end, "usage": {"output_tokens": 2}},
            {"type": "message_stop"},
        ]
        stream = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)
        self._send(200, "text/event-stream", stream.encode())

    def _send(self, status: int, kind: str, data: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    thread = threading.Thread(target=service.serve_forever, daemon=True)
    thread.start()
    yield service
    service.shutdown()
    service.server_close()


@rl.function
def talk(s: Any, words: str) -> None:
    s += rl.system("Be brief.")
    s += rl.user(words)
    s += rl.assistant("Well: " + rl.gen("first", stop="!"))
    s += rl.user("And " + rl.image("data:image/png;base64,AAAA"))
    s += rl.assistant(rl.gen("second", max_tokens=9))


def test_bodies_and_answers(service: Service) -> None:
    backend = rl.Anthropic("a-model", url=service.url, api_key="key")
    state = talk.run("hello", backend=backend, temperature=0.5, top_k=4)
    first, second = service.bodies
    assert first == {
        "model": "a-model",
        "system": "Be brief.",
        "messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Well: "}],
        "max_tokens": 128,
        "temperature": 0.5,
        "top_k": 4,
        "stop_sequences": ["!"],
    }
    assert second["messages"][1] == {"role": "assistant", "content": f"Well: {state['first']}"}
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    assert second["messages"][2]["content"] == [{"type": "text", "text": "And "}, {"type": "image", "source": source}]
    assert second["max_tokens"] == 9
    meta = state.get_meta_info("second")
    assert meta["finish_reason"] == {"type": "stop", "matched": None} and meta["cached_tokens"] == 3
    stream = talk.run("hello", backend=backend, stream=True, temperature=0.5, top_k=4)
    assert "".join(stream.text_iter()) == state.text() and len(list(stream.text_iter("first"))) > 3
    assert stream.get_meta_info("first") == state.get_meta_info("first")


def test_refusals(service: Service) -> None:
    backend = rl.Anthropic("a-model", url=service.url, api_key="wrong")
    with pytest.raises(rl.ProgramError, match="invalid x-api-key") as caught:
        talk.run("hello", backend=backend).text()
    assert caught.value.status == 401
    calls = len(service.bodies)
    for deed, message in (
        (lambda s: s.__iadd__("plain" + rl.gen("x")), "cannot do prompts that are plain text"),
        (lambda s: s.__iadd__(rl.user("a") + rl.assistant(rl.gen("x", min_p=0.5))), "no parameter like min_p"),
        (lambda s: s.__iadd__(rl.user("a") + rl.user(rl.gen("x"))), "cannot continue a message of user"),
        (lambda s: s.__iadd__(rl.user("a") + rl.system("b") + rl.assistant(rl.gen("x"))), "takes one system message"),
    ):

        def program(s: Any, deed: Any = deed) -> None:
            deed(s)

        with pytest.raises(rl.ProgramError, match=message):
            rl.function(program).run(backend=backend).text()
    assert len(service.bodies) == calls


def test_a_message_is_dictated_in_one_call(service: Service) -> None:
    """Where the model cannot be handed the beginning of a message, it is asked for the whole one."""

    @rl.function(num_api_spec_tokens=64)
    def form(s: Any) -> None:
        s += rl.user("Name a town and its river, as Town: ... River: ...")
        s += rl.assistant("Town: " + rl.gen("town", stop="\n") + "\nRiver: " + rl.gen("river"))

    backend = rl.Anthropic("a-model", url=service.url, api_key="key", prefill=False)
    service.said = "Town: Rome\nRiver: Tiber"
    state = form.run(backend=backend)
    assert (state["town"], state["river"]) == ("Rome", "Tiber") and len(service.bodies) == 1
    assert service.bodies[0]["max_tokens"] == 64 and "stop_sequences" not in service.bodies[0]
    assert state.messages()[1]["content"] == service.said
    service.said = "I do not know any."
    with pytest.raises(rl.ProgramError, match=r"'Town: ' was expected, and after 3 calls it began with 'I do not"):
        form.run(backend=backend).text()
