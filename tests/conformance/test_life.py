"""LIFE-1, LIFE-5, LIFE-6 and SEC-1: health while loading and under load, flags that contradict, sockets that are open.

LIFE-2 (draining), LIFE-3 (a port in use) and LIFE-4 (children die with their parent) are in `tests/e2e/test_life.py`.
"""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from support import tiny
from support.live import Server, check_error, environment, free_port, until
from support.words import ids

Start = Callable[..., Server]

SIZES = ("--max-total-tokens", "65536")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.random_model(tmp_path_factory.mktemp("life") / "model")


@pytest.fixture
def start(model: Path) -> Iterator[Start]:
    """Starts servers; those that still run at the end are stopped, which must go well."""
    started: list[Server] = []

    def make(*arguments: str, wait: bool = True, port: int | None = None) -> Server:
        started.append(Server(model, *SIZES, *arguments, wait=wait, port=port))
        return started[-1]

    yield make
    while started:
        started.pop().stop()


def test_life_1_health_while_loading(start: Start) -> None:
    server = start(wait=False)
    seen: list[int | None] = []
    while not seen or seen[-1] != 200:
        assert time.monotonic() - server.started < 60, server.log()
        seen.append(server.health())
        if seen[-1] == 503:
            begin = time.monotonic()
            body = {"model": server.model, "prompt": "Hi", "max_tokens": 1}
            with contextlib.suppress(httpx.TransportError):
                for response in (
                    server.get("/v1/models"),
                    server.post("/v1/completions", body),
                    server.get("/metrics"),
                ):
                    if response.status_code != 200:  # it may have become ready just now
                        assert response.status_code == 503
                        assert check_error(response)["code"] == "starting"
                        assert response.headers["retry-after"]
            assert time.monotonic() - begin < 2.0, "routes are to answer at once while loading"
        time.sleep(0.05)
    assert server.complete(prompt="Hi", max_tokens=1)["choices"]
    first = seen.index(503) if 503 in seen else len(seen) - 1
    assert set(seen[:first]) <= {None} and set(seen[first:-1]) <= {503}


def test_life_5_health_under_load(start: Start) -> None:
    """64 long requests run and 64 wait, for ten seconds."""
    server = start("--max-running-requests", "64", "--max-total-tokens", "262144")
    body = {"model": server.model, "max_tokens": 1900, "stream": True, "ignore_eos": True}
    sockets = [server.send("/v1/completions", {**body, "prompt": ids(100, 10 * i)}) for i in range(128)]
    until(lambda: (server.figures()["running"], server.figures()["waiting"]) == (64, 64), 20, "a full server")
    slowest, end = 0.0, time.monotonic() + 10.0
    while time.monotonic() < end:
        begin = time.monotonic()
        assert server.health() == 200
        slowest = max(slowest, time.monotonic() - begin)
        time.sleep(0.01)
    assert slowest < 1.0
    assert server.figures()["running"] == 64, "the requests are too short for this test"
    for connection in sockets:
        connection.close()
    server.check_well()


def test_life_6_contradictory_flags(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "radixlm", "serve", str(model), "--port", str(free_port())]
    command += ["--max-prefill-tokens", "64", "--chunked-prefill-size", "256"]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "max-prefill-tokens" in line and "chunked-prefill-size" in line


def test_life_6_a_small_budget_cuts_the_chunk(start: Start) -> None:
    """The prefill budget alone: the chunk follows it, and a prompt longer than both works."""
    small, usual = start("--max-prefill-tokens", "32"), start()
    asked = {"prompt": ids(500), "max_tokens": 16, "ignore_eos": True}
    assert small.text(**asked) == usual.text(**asked)
    decision = small.get("/server_info").json()["decisions"]["chunked_prefill_size"]
    assert decision["value"] == "32" and "max-prefill-tokens" in decision["reason"]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_sec_1_no_open_inner_sockets(start: Start, host: str) -> None:
    server = start("--host", host)
    (directory,) = server.scratch.iterdir()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert directory.stat().st_uid == os.getuid()
    listening = [
        connection
        for process in server.processes()
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert {(connection.laddr.ip, connection.laddr.port) for connection in listening} == {(host, server.port)}
    unix = {connection.laddr for process in server.processes() for connection in process.net_connections("unix")} - {
        "",
        None,
    }
    assert unix, "the processes talk through unix sockets"
    assert all(str(path).startswith(str(directory)) for path in unix), unix
    unsafe = [path for path in directory.iterdir() if path.is_file() and stat.S_IMODE(path.stat().st_mode) & 0o077]
    assert not unsafe
