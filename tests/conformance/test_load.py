"""LOAD: requests that are large in one way or another are answered or refused, and nobody else waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from support.live import Server
from support.words import encode

COMPLETIONS = "/v1/completions"


@contextmanager
def watched(server: Server, *, stream: bool = False) -> Iterator[None]:
    """Meanwhile `/health` answers within a second, and a running stream has no gap of two."""
    over = threading.Event()
    slowest = {"health": 0.0, "gap": 0.0}

    def ask_health() -> None:
        while not over.wait(0.1):
            begin = time.monotonic()
            assert server.http.get("/health").status_code == 200
            slowest["health"] = max(slowest["health"], time.monotonic() - begin)

    def read_stream() -> None:
        body = {"model": server.model, "prompt": "A stream", "max_tokens": 2000, "ignore_eos": True}
        while not over.is_set():
            last = time.monotonic()
            with server.open(COMPLETIONS, body) as events:
                for _ in events:
                    slowest["gap"] = max(slowest["gap"], time.monotonic() - last)
                    last = time.monotonic()
                    if over.is_set():
                        break

    threads = [threading.Thread(target=work) for work in (ask_health, *([read_stream] if stream else []))]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(30)
    assert slowest["health"] < 1.0
    assert slowest["gap"] < 2.0


def test_load_1_large_prompt_lists(plain: Server) -> None:
    with watched(plain):
        answer = plain.complete(prompt=["a"] * 2000, max_tokens=1, ignore_eos=True)
    assert [choice["index"] for choice in answer["choices"]] == list(range(2000))
    assert len({choice["text"] for choice in answer["choices"]}) == 1
    error = plain.refused(COMPLETIONS, {"model": plain.model, "prompt": ["a"] * 5000, "max_tokens": 1})
    assert "4096" in error["message"]


def test_load_2_a_ten_megabyte_prompt(plain: Server) -> None:
    with watched(plain, stream=True):
        begin = time.monotonic()
        response = plain.post(COMPLETIONS, {"model": plain.model, "prompt": "word " * 2_000_000, "max_tokens": 64})
        assert response.status_code in (400, 413), response.text[:300]
        assert time.monotonic() - begin < 10


def test_load_2_a_body_over_the_limit(plain: Server) -> None:
    response = plain.post(COMPLETIONS, {"model": plain.model, "prompt": "word " * 4_000_000})
    assert response.status_code == 413
    assert str(16 << 20) in response.json()["error"]["message"]


def test_load_3_text_without_spaces(plain: Server) -> None:
    with watched(plain):
        begin = time.monotonic()
        response = plain.post(COMPLETIONS, {"model": plain.model, "prompt": "a" * 1_000_000, "max_tokens": 1})
        assert response.status_code == 400, response.text[:300]
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert time.monotonic() - begin < 15


def test_load_3_text_without_spaces_that_fits(plain: Server) -> None:
    text = "a" * 4000
    assert plain.complete(prompt=text, max_tokens=1)["usage"]["prompt_tokens"] == len(encode(text))


def test_load_ids_without_end(plain: Server) -> None:
    begin = time.monotonic()
    response = plain.post(COMPLETIONS, {"model": plain.model, "prompt": [5] * 3_000_000, "max_tokens": 1})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert time.monotonic() - begin < 10


def test_load_nesting_without_end(plain: Server) -> None:
    for text in ("[" * 100_000, '{"a":' * 100_000):
        response = plain.http.post(COMPLETIONS, content=text, headers={"content-type": "application/json"})
        assert response.status_code == 400
