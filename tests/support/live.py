"""A server in processes of its own, as a user starts it, and a strict client for it."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import httpx
import psutil

from support.errors import error_of
from support.models import packaged

Json = dict[str, Any]
T = TypeVar("T")

START_SECONDS = 60.0
STOP_SECONDS = 20.0

SOURCES = Path(__file__).parents[2] / "src"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def environment(scratch: Path) -> dict[str, str]:
    """This process's environment without our own variables, with the shared cache and a private place for sockets."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RADIXLM_")}
    paths = [str(SOURCES), plain.get("PYTHONPATH", "")]
    return {
        **plain,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "RADIXLM_CACHE": str(packaged().directory.parent),
        "TMPDIR": str(scratch),
        "NO_COLOR": "1",
    }


def together(calls: Iterable[Callable[[], T]]) -> list[T]:
    """The results of calls made at the same time, in their order."""
    waiting = list(calls)
    with ThreadPoolExecutor(len(waiting)) as pool:
        return [future.result() for future in [pool.submit(call) for call in waiting]]


def until(condition: Callable[[], bool], seconds: float = 5.0, what: str = "the condition") -> None:
    """Wait until it holds; fail after `seconds`."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, f"{what} did not come to hold within {seconds:g} s"
        time.sleep(0.02)


def strict_json(data: bytes) -> Any:
    """JSON as the standard has it: UTF-8, no NaN, no Infinity."""

    def refuse(name: str) -> Any:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(data.decode("utf-8", "strict"), parse_constant=refuse)


class Refused(AssertionError):
    """The server answered with an error. `status` and `error` are what it said."""

    def __init__(self, status: int, error: Json) -> None:
        super().__init__(f"status {status}: {error}")
        self.status = status
        self.error = error


def check_error(response: httpx.Response) -> Json:
    """The error object of an answer, after a look at its shape."""
    error = error_of(strict_json(response.content))
    assert isinstance(error["message"], str) and error["message"]
    assert error.get("code", True)
    assert "Traceback" not in error["message"] and 'File "' not in error["message"], error
    assert len(response.content) < 2048
    return error


class Events:
    """A stream of server-sent events that is being read. A line is `data: <json>`, `data: [DONE]`, a comment or blank.

    Attributes:
        done: `[DONE]` was read.
        error: the error event that ended it, if one did.
    """

    def __init__(self, response: httpx.Response) -> None:
        self.done = False
        self.error: Json | None = None
        self._lines = response.iter_raw()
        self._held = b""

    def __iter__(self) -> Iterator[Json]:
        for data in self._lines:
            *lines, self._held = (self._held + data).split(b"\n")
            for line in lines:
                if not line or line.startswith(b":"):
                    continue
                assert not self.done, f"a line follows [DONE]: {line!r}"
                assert line.startswith(b"data: "), line
                payload = line.removeprefix(b"data: ")
                if payload == b"[DONE]":
                    self.done = True
                    continue
                event = strict_json(payload)
                if "error" in event:
                    self.error = event["error"]
                    continue
                yield event
        assert not self._held, f"the stream ends in the middle of a line: {self._held!r}"


class Server:
    """A running server.

    Attributes:
        model: the name that clients use.
        pid: of its first process.
    """

    def __init__(
        self,
        model: Path | str,
        *arguments: str,
        name: str = "tiny",
        key: str | None = None,
        port: int | None = None,
        wait: bool = True,
        generates: bool = True,
    ) -> None:
        """Start it and wait until it is ready.

        Args:
            key: sent with every request.
            generates: its model continues texts, not only makes vectors of them.
            wait: False returns at once.
        """
        self.model = name
        self.generates = generates
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.scratch = Path(tempfile.mkdtemp(prefix="rl-"))
        self.log_file = self.scratch.with_suffix(".log")
        self.started = time.monotonic()
        command = [sys.executable, "-m", "radixlm", "serve", str(model), "--port", str(self.port)]
        command += ["--served-model-name", name, "--threads", "1", *arguments]
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(self.scratch),
                cwd=self.scratch,
            )
        self.pid = self.process.pid
        atexit.register(self.kill)  # whatever happens to the tests, no server outlives them
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.http = httpx.Client(
            base_url=self.url, headers=headers, timeout=60.0, limits=httpx.Limits(max_connections=None), trust_env=False
        )
        if wait:
            self.wait_ready()
        self.family = set(self.processes()) if wait else set()

    # ---- its life

    def wait_ready(self) -> None:
        while self.health() != 200:
            if self.process.poll() is not None:
                self._give_up(f"the server ended with status {self.process.returncode}")
            if time.monotonic() - self.started > START_SECONDS:
                self._give_up(f"the server was not ready within {START_SECONDS:g} s")
            time.sleep(0.05)

    def _give_up(self, why: str) -> NoReturn:
        said = self.log()
        self.kill()
        raise AssertionError(f"{why}:\n{said}")

    def health(self) -> int | None:
        """The status of `/health`, None if nobody listens."""
        try:
            return self.http.get("/health", timeout=5.0).status_code
        except httpx.TransportError:
            return None

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """All of the server's processes that run."""
        with contextlib.suppress(psutil.NoSuchProcess):
            first = psutil.Process(self.pid)
            return [first, *first.children(recursive=True)]
        return []

    def memory(self) -> int:
        """Bytes that its processes hold."""
        return sum(process.memory_info().rss for process in self.processes())

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def stop(self) -> None:
        """SIGTERM: it exits 0 and leaves no process and no file."""
        if self.process.poll() is None:
            family = self.processes()
            self.signal(signal.SIGTERM)
            try:
                status = self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._give_up(f"the server did not end within {STOP_SECONDS:g} s")
            if status != 0:
                self._give_up(f"the server ended with status {status}")
            self.check_gone(family)
        self.close()

    def check_gone(self, family: Sequence[psutil.Process], seconds: float = 0.0) -> None:
        """No process of it is left, and none of its sockets and files."""
        _, alive = psutil.wait_procs(family, timeout=seconds)
        assert not alive, f"left behind: {alive}"
        assert not list(self.scratch.iterdir()), f"left behind: {list(self.scratch.iterdir())}"

    def kill(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(10.0)
        self.close()

    def close(self) -> None:
        atexit.unregister(self.kill)
        self.http.close()
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.log_file.unlink(missing_ok=True)

    def check_well(self) -> None:
        """As after every case: the same processes, healthy, nothing running, every page free or in the tree."""
        assert self.process.poll() is None, f"the server ended with {self.process.returncode}:\n{self.log()}"
        assert set(self.processes()) == self.family, "a process of the server was replaced"
        assert self.health() == 200
        self.check_settles()
        if self.generates:
            answer = self.complete(prompt="Hello", max_tokens=3, ignore_eos=True, cache_salt="check_well")
            assert answer["usage"]["completion_tokens"] == 3
        else:
            assert self.ask("/encode", {"text": "Hello"})["embedding"]
        self.check_settles()

    def check_settles(self, seconds: float = 5.0) -> None:
        """Soon nothing runs or waits, and every page is free or evictable."""

        def settled() -> bool:
            figures = self.figures()
            busy = figures["running"] + figures["waiting"] + figures["pool_leased"] + figures["pool_pinned"]
            return bool(busy == 0 and figures["pool_free"] + figures["pool_evictable"] == figures["pool_total"])

        until(settled, seconds, "an idle engine")

    # ---- requests

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.http.get(path, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.http.post(path, json={} if body is None else body, **options)

    def ask(self, path: str, body: Json) -> Json:
        """The answer of a POST. Raises `Refused` for an error, whose shape is checked."""
        response = self.post(path, body)
        if response.status_code >= 400:
            raise Refused(response.status_code, check_error(response))
        assert response.headers["content-type"] == "application/json"
        answer: Json = strict_json(response.content)
        return answer

    def refused(self, path: str, body: Json, status: int = 400) -> Json:
        """The error of a POST that must be refused with `status`, whole and as a stream."""
        error: Json = {}
        for stream in (False, True) if path.startswith("/v1/c") else (False,):
            extra = {"stream": True} if stream and body.get("stream") is None else {}
            response = self.post(path, {**body, **extra})
            assert response.status_code == status, f"{response.status_code}: {response.text[:500]}"
            error = check_error(response)
        return error

    def complete(self, **body: Any) -> Json:
        """`/v1/completions`, greedy unless said otherwise."""
        return self.ask("/v1/completions", {"model": self.model, "temperature": 0, **body})

    def chat(self, content: str | None = None, **body: Any) -> Json:
        """`/v1/chat/completions`, greedy unless said otherwise. `content` is one user message."""
        return self.ask("/v1/chat/completions", self._chat(content, body))

    def text(self, **body: Any) -> str:
        """The text of a completion."""
        return str(self.complete(**body)["choices"][0]["text"])

    @contextlib.contextmanager
    def open(self, path: str, body: Json) -> Iterator[Events]:
        """A stream; leaving the context disconnects. Raises `Refused` as `ask` does."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            if response.status_code >= 400:
                response.read()
                raise Refused(response.status_code, check_error(response))
            assert response.headers["content-type"].startswith("text/event-stream")
            yield Events(response)

    def send(self, path: str, body: Json) -> socket.socket:
        """Send a POST and read nothing. Closing the socket disconnects."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=10.0)
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return connection

    def events(self, path: str, body: Json) -> list[Json]:
        """All chunks of a stream that ends well: with exactly one `[DONE]`."""
        with self.open(path, body) as events:
            chunks = list(events)
        assert events.error is None, events.error
        assert events.done, "the stream ended without [DONE]"
        return chunks

    def complete_stream(self, **body: Any) -> list[Json]:
        return self.events("/v1/completions", {"model": self.model, "temperature": 0, **body})

    def chat_stream(self, content: str | None = None, **body: Any) -> list[Json]:
        return self.events("/v1/chat/completions", self._chat(content, body))

    def _chat(self, content: str | None, body: Json) -> Json:
        messages = {} if content is None else {"messages": [{"role": "user", "content": content}]}
        return {"model": self.model, "temperature": 0, **messages, **body}

    def tokenize(self, **body: Any) -> list[int]:
        tokens: list[int] = self.ask("/tokenize", {"model": self.model, **body})["tokens"]
        return tokens

    def flush(self) -> None:
        """Empty the prefix cache."""
        self.check_settles()
        assert self.post("/flush_cache").status_code == 200

    # ---- figures

    def figures(self) -> Json:
        """The engine's own: gauges and totals."""
        figures: Json = self.get("/server_info").json()["engine"]
        assert figures is not None, "the engine did not answer"
        return figures

    def metrics(self) -> dict[str, float]:
        """Samples of `/metrics` without labels other than the model's, by name."""
        found = re.findall(r'^radixlm:(\w+)\{model_name="[^"]*"\} (\S+)$', self.get("/metrics").text, re.MULTILINE)
        return {name: float(value) for name, value in found}


def deltas(chunks: Sequence[Mapping[str, Any]], index: int = 0) -> list[str]:
    """The texts of one choice of a stream, in order."""
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return [choice["delta"].get("content") or "" if "delta" in choice else choice["text"] for choice in choices]


def finishes(chunks: Sequence[Mapping[str, Any]], index: int = 0) -> list[str]:
    """The finish reasons of one choice of a stream: exactly one, if all is well."""
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None]
