"""The HTTP client against sockets that answer byte for byte what the test says."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixlm.base import errors
from radixlm.base.errors import RadixError, TimedOut, Unavailable
from radixlm.client import connection
from radixlm.client.framing import EventDecoder, ResponseDecoder
from radixlm.client.http import Client

T = TypeVar("T")
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

EVENTS = [{"n": 1, "text": "a"}, {"n": 2, "text": "é\u2603"}, {"n": 3, "text": "x" * 70}]


def sse(events: list[Any], done: bool = True) -> bytes:
    parts = [f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode() for event in events]
    return b": a comment\n\n" + b"".join(parts) + (b"data: [DONE]\n\n" if done else b"")


def chunked(body: bytes, size: int) -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x;name=value\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\nX-Trailer: 1\r\n\r\n"


def response(body: bytes, *headers: str, status: str = "200 OK", length: bool = True) -> bytes:
    lines = [f"HTTP/1.1 {status}", *headers, *([f"Content-Length: {len(body)}"] if length else [])]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


STREAM_HEADERS = ("content-type: text/event-stream; charset=utf-8", "Transfer-Encoding: chunked")
STREAM = b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + response(
    chunked(sse(EVENTS), 11), *STREAM_HEADERS, length=False
)


async def read_request(reader: asyncio.StreamReader) -> tuple[str, dict[str, str], bytes]:
    """(request line, headers, body) of one request; raises IncompleteReadError when the client is gone."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    return head[0], headers, await reader.readexactly(int(headers.get("content-length", 0)))


@asynccontextmanager
async def serving(handler: Handler, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """The URL of a server that runs `handler` for each connection; a handler's failure fails the test."""
    failures: list[BaseException] = []

    async def guarded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except Exception as error:
            failures.append(error)
        finally:
            writer.close()

    server = await asyncio.start_server(guarded, "127.0.0.1", 0, ssl=tls)
    async with server:
        host, port = server.sockets[0].getsockname()
        yield f"{'https' if tls else 'http'}://{host}:{port}"
    assert not failures, failures


def answering(*pieces: bytes) -> Handler:
    """Answers every request with the same bytes, in these pieces, then closes."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)

    return handler


def run(scene: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(60):
            return await scene

    return asyncio.run(bounded())


async def events_of(client: Client, path: str = "/v1/completions") -> list[Any]:
    return [json.loads(event) async for event in client.events(path, {})]


async def events_until_error(url: str) -> tuple[list[Any], RadixError | None]:
    got = []
    async with Client(url) as client:
        try:
            async for event in client.events("/v1/completions", {}):
                got.append(json.loads(event))
        except RadixError as error:
            return got, error
    return got, None


# ---- framing, without sockets


def decode(pieces: list[bytes], closed: bool = False) -> tuple[ResponseDecoder, bytes]:
    decoder = ResponseDecoder()
    body = b"".join(decoder.feed(piece) for piece in pieces)
    if closed:
        decoder.end()
    return decoder, body


def test_response_cut_at_every_byte() -> None:
    for at in range(len(STREAM) + 1):
        decoder, body = decode([STREAM[:at], STREAM[at:]])
        assert body == sse(EVENTS), at
        assert decoder.complete and decoder.reusable and decoder.status == 200


@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, len(STREAM)), max_size=40), size=st.integers(1, 300))
def test_response_cut_anywhere(cuts: list[int], size: int) -> None:
    wire = response(chunked(sse(EVENTS), size), *STREAM_HEADERS, length=False)
    edges = [0, *sorted(min(cut, len(wire)) for cut in cuts), len(wire)]
    decoder, body = decode([wire[a:b] for a, b in itertools.pairwise(edges)])
    assert (decoder.complete, body) == (True, sse(EVENTS))


@settings(deadline=None)
@given(st.lists(st.text(st.characters(exclude_characters="\r\n", codec="utf-8")), max_size=8), st.data())
def test_events_cut_anywhere(texts: list[str], data: st.DataObject) -> None:
    ending = data.draw(st.sampled_from([b"\n", b"\r\n"]))
    wire = b"".join(
        b": c" + ending + b"event: e" + ending + b"data: " + text.encode() + ending + ending for text in texts
    )
    edges = [0, *sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=20))), len(wire)]
    decoder = EventDecoder()
    events = [event for a, b in itertools.pairwise(edges) for event in decoder.feed(wire[a:b])]
    assert events == [text.encode() for text in texts]


def test_event_of_several_lines() -> None:
    assert EventDecoder().feed(b"data:one\ndata: two\nid: 7\ndata\n\n\n\ndata: x\n") == [b"one\ntwo\n"]


@pytest.mark.parametrize(
    ("wire", "body", "complete"),
    [
        (response(b"hello"), b"hello", True),
        (response(b"", status="204 No Content", length=False), b"", True),
        (response(b"until the end", length=False), b"until the end", True),
        (response(b"hello")[:-1], b"hell", False),
        (response(b"5\r\nhel", "Transfer-Encoding: chunked", length=False), b"hel", False),
    ],
)
def test_body_forms(wire: bytes, body: bytes, complete: bool) -> None:
    decoder, got = decode([wire], closed=True)
    assert (got, decoder.complete) == (body, complete)


@pytest.mark.parametrize(
    "wire",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * (70 << 10),
    ],
)
def test_not_http(wire: bytes) -> None:
    with pytest.raises(Unavailable) as caught:
        decode([wire])
    assert caught.value.code == "bad_response"


@pytest.mark.parametrize(
    ("headers", "reusable"), [((), True), (("Connection: close",), False), (("Connection: Keep-Alive",), True)]
)
def test_keep_alive_is_the_servers_choice(headers: tuple[str, ...], reusable: bool) -> None:
    assert decode([response(b"x", *headers)])[0].reusable is reusable
    assert not decode([response(b"x") + b"surplus"])[0].reusable


# ---- over sockets


def test_stream_cut_at_every_byte_of_a_socket() -> None:
    async def scene() -> None:
        cut = iter(range(len(STREAM)))

        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await answering(STREAM[: (at := next(cut))], STREAM[at:])(reader, writer)

        async with serving(handler) as url, Client(url) as client:
            for _ in range(len(STREAM)):
                assert await events_of(client) == EVENTS

    run(scene())


def test_stream_that_breaks_off_anywhere_is_an_error() -> None:
    async def scene() -> None:
        cut = iter(range(len(STREAM)))

        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await answering(STREAM[: next(cut)])(reader, writer)

        async with serving(handler) as url:
            for at in range(len(STREAM)):
                got, error = await events_until_error(url)
                assert got == EVENTS[: len(got)]
                if error is None:  # all events and [DONE] were there; only the framing behind them is missing
                    assert got == EVENTS and at > STREAM.index(b"DONE")
                else:
                    assert error.code == "connection_lost" and url in error.message

    run(scene())


@pytest.mark.parametrize(
    ("status", "body", "kind", "message", "code"),
    [
        (400, b'{"error": {"message": "too long", "code": "context_length_exceeded"}}', errors.BadRequest, "too long",
         "context_length_exceeded"),
        (401, b'{"error": {"message": "bad key", "code": 401}}', errors.Unauthorized, "bad key", "invalid_api_key"),
        (404, b'{"object": "error", "message": "no such model"}', errors.NotFound, "no such model", "not_found"),
        (429, b'{"error": "slow down"}', errors.QueueFull, "slow down", "queue_full"),
        (500, b"<html>oops</html>", errors.Internal, "<html>oops</html>", "internal_error"),
        (503, b"", errors.Unavailable, "no reason given", "unavailable"),
        (400, b'{"detail": [{"loc": ["body"]}]}', errors.BadRequest, "[{'loc': ['body']}]", "invalid_request"),
        (400, b"[1]", errors.BadRequest, "[1]", "invalid_request"),
    ],
)  # fmt: skip
def test_error_bodies(status: int, body: bytes, kind: type[RadixError], message: str, code: str) -> None:
    async def scene(streamed: bool) -> RadixError:
        async with serving(answering(response(body, status=f"{status} Reason"))) as url, Client(url) as client:
            with pytest.raises(kind) as caught:
                await (events_of(client) if streamed else client.post("/v1/completions", {}))
            assert caught.value.message == f"{url}/v1/completions answered {status}: {message}"
            return caught.value

    for streamed in (False, True):
        error = run(scene(streamed))
        assert (type(error), error.code) == (kind, code)


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        (b'{"error": {"message": "engine died", "code": "unavailable", "status": 503}}', errors.Unavailable),
        (b'{"error":{"message":"engine died","code":400}}', errors.BadRequest),
        (b'{"object": "error", "message": "engine died"}', errors.Internal),
    ],
)
def test_error_inside_a_stream(event: bytes, kind: type[RadixError]) -> None:
    body = sse(EVENTS[:1], done=False) + b"data: " + event + b"\n\n"

    async def scene() -> None:
        wire = response(chunked(body, 1000), *STREAM_HEADERS, length=False)
        async with serving(answering(wire)) as url:
            got, error = await events_until_error(url)
        assert got == EVENTS[:1]
        assert type(error) is kind and "engine died" in error.message

    run(scene())


def test_a_stream_is_asked_for_and_json_comes() -> None:
    async def scene() -> None:
        wire = response(b"{}", "Content-Type: application/json")
        async with serving(answering(wire)) as url, Client(url) as client:
            with pytest.raises(Unavailable, match="application/json where an event stream"):
                await events_of(client)

    run(scene())


def test_connections_are_kept_and_replaced() -> None:
    opened: list[int] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened.append(0)
        while opened[-1] < 3:  # the fourth request of a connection finds it closed
            line, _, _ = await read_request(reader)
            opened[-1] += 1
            writer.write(STREAM if "completions" in line else response(b'{"ok": true}'))
            await writer.drain()

    async def scene() -> None:
        async with serving(handler) as url, Client(url) as client:
            for _ in range(3):
                assert await client.get("/a") == {"ok": True}
                assert await events_of(client) == EVENTS
                assert await client.post("/b", [1]) == {"ok": True}
                await asyncio.sleep(0.02)
        assert opened == [3, 3, 3]

    run(scene())


def test_a_connection_closed_under_a_request_is_tried_once_more() -> None:
    """The server closes a kept connection only when the next request is already on its way."""
    seen: list[str] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for turn in range(2):
            line, _, _ = await read_request(reader)
            seen.append(line.split()[1])
            if turn == 1:
                return
            writer.write(response(b"1"))
            await writer.drain()

    async def scene() -> None:
        async with serving(handler) as url, Client(url) as client:
            assert await client.get("/one") == 1
            assert await client.get("/two") == 1
            assert seen == ["/one", "/two", "/two"]

    run(scene())


def test_idle_connections_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "IDLE_SECONDS", 0.0)
    opened: list[int] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened.append(1)
        await answering(response(b"1"))(reader, writer)
        await reader.read()

    async def scene() -> None:
        async with serving(handler) as url, Client(url) as client:
            assert [await client.get("/"), await client.get("/")] == [1, 1]
        assert len(opened) == 2

    run(scene())


def test_leaving_a_stream_tells_the_server() -> None:
    async def scene() -> None:
        gone = asyncio.Event()

        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_request(reader)
            writer.write(response(b"c\r\ndata: {}\n\n\r\n".replace(b"c", b"a"), *STREAM_HEADERS, length=False))
            await writer.drain()
            assert await reader.read() == b""  # the client's side is closed
            gone.set()

        async with serving(handler) as url, Client(url) as client:
            async with aclosing(client.events("/x", {})) as events:
                async for _ in events:
                    break
            await gone.wait()

    run(scene())


def test_silence_and_nobody_there() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def scene() -> None:
        async with serving(silent) as url, Client(url, timeout=0.05) as client:
            with pytest.raises(TimedOut, match=r"/health: the server was silent for 0.05 s"):
                await client.get("/health")
            assert not await client.health()
        async with Client(url) as client:  # the port is free now
            with pytest.raises(Unavailable, match="is the server running") as caught:
                await client.get("/health")
            assert caught.value.code == "no_server"
            assert not await client.health()

    run(scene())


def test_requests_as_sent() -> None:
    seen: list[tuple[str, dict[str, str], Any]] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            line, headers, body = await read_request(reader)
            seen.append((line, headers, json.loads(body) if body else None))
            if "models" in line:
                writer.write(response(b'{"data": [{"id": "served"}]}'))
            else:
                writer.write(STREAM if json.loads(body).get("stream") else response(b'{"choices": []}'))
            await writer.drain()

    async def scene() -> None:
        async with serving(handler) as url, Client(f"{url}/under/v1/", "se cret") as client:
            await client.completions([1, 2], max_tokens=3)
            await client.chat([{"role": "user", "content": "é"}], model="other")
            assert [chunk async for chunk in client.stream_completions("a", temperature=0)] == EVENTS
            assert [chunk async for chunk in client.stream_chat([])] == EVENTS

    run(scene())
    assert [line for line, _, _ in seen] == [
        "GET /under/v1/models HTTP/1.1",
        "POST /under/v1/completions HTTP/1.1",
        "POST /under/v1/chat/completions HTTP/1.1",
        "POST /under/v1/completions HTTP/1.1",
        "POST /under/v1/chat/completions HTTP/1.1",
    ]
    assert all(headers["authorization"] == "bearer se cret" and "host" in headers for _, headers, _ in seen)
    assert [body for _, _, body in seen] == [
        None,
        {"model": "served", "prompt": [1, 2], "max_tokens": 3},
        {"model": "other", "messages": [{"role": "user", "content": "é"}]},
        {"model": "served", "prompt": "a", "stream_options": {"include_usage": True}, "temperature": 0, "stream": True},
        {"model": "served", "messages": [], "stream_options": {"include_usage": True}, "stream": True},
    ]


@pytest.mark.parametrize("url", ["", "ftp://x", "http://", "http://x:port", "http://[::1", "http://x:99999"])
def test_bad_urls(url: str) -> None:
    with pytest.raises(errors.BadRequest, match="is not a server's URL"):
        Client(url)


@pytest.mark.parametrize("key", ["a\r\nX-Injected: 1", "ключ"])
def test_bad_keys(key: str) -> None:
    with pytest.raises(errors.BadRequest, match="plain ASCII"):
        Client("http://x", key)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("127.0.0.1:30000", "http://127.0.0.1:30000"),
        ("https://host/v1", "https://host"),
        ("http://[::1]:80/a/", "http://[::1]:80/a"),
    ],
)
def test_urls(url: str, shown: str) -> None:
    assert Client(url).url == shown


@pytest.mark.skipif(shutil.which("openssl") is None, reason="making a certificate needs the openssl command")
def test_tls(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-keyout", key, "-out", certificate, "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    server_side = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server_side.load_cert_chain(certificate, key)
    trusting = ssl.create_default_context(cafile=str(certificate))

    async def scene() -> None:
        async with serving(answering(STREAM), server_side) as url:
            async with Client(url, tls=trusting) as client:
                assert await events_of(client) == EVENTS
            async with Client(url) as client:
                with pytest.raises(Unavailable, match="cannot reach"):
                    await events_of(client)

    run(scene())
