"""A server's life: idle costs nothing, it drains, it survives its clients, and nothing outlives it."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from support.live import Refused, Server, environment, finishes, until
from support.tiny import random_model

pytestmark = pytest.mark.xdist_group("life")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def server(model: Path) -> Iterator[Server]:
    made = Server(model)
    yield made
    made.kill()


def stream(server: Server, tokens: int, results: list[object]) -> threading.Thread:
    """Read a long stream in a thread; its finish reasons, or what went wrong, end up in `results`."""

    def read() -> None:
        try:
            body = {"model": server.model, "prompt": "Say it:", "max_tokens": tokens, "ignore_eos": True}
            with server.open("/v1/completions", body) as events:
                chunks = list(events)
            results.append((finishes(chunks), events.done, events.error))
        except (Refused, httpx.HTTPError, AssertionError) as error:
            results.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    return thread


def test_an_idle_server_costs_nothing(server: Server) -> None:
    server.text(prompt="Hello", max_tokens=4)
    time.sleep(1.0)

    def busy() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in server.processes())

    before = busy()
    time.sleep(10.0)
    assert busy() - before < 0.1, "an idle server took more than 1 % of a core over 10 s"


def test_sigterm_lets_running_streams_finish(server: Server) -> None:
    results: list[object] = []
    threads = [stream(server, 300, results) for _ in range(3)]
    until(lambda: server.figures()["running"] == 3, what="three running streams")
    family = server.processes()
    server.signal(signal.SIGTERM)
    time.sleep(0.2)
    try:
        refused = server.post("/v1/completions", {"model": server.model, "prompt": "x"}).status_code
        assert refused == 503
    except httpx.TransportError:
        pass  # not listening any more is a refusal too
    for thread in threads:
        thread.join(30)
    assert results == [(["length"], True, None)] * 3
    assert server.process.wait(10) == 0, server.log()
    server.check_gone(family, 1.0)


def test_a_drain_is_bounded(model: Path) -> None:
    server = Server(model, "--shutdown-timeout", "1")
    results: list[object] = []
    thread = stream(server, 1900, results)
    until(lambda: server.figures()["running"] == 1)
    family = server.processes()
    started = time.monotonic()
    server.signal(signal.SIGTERM)
    assert server.process.wait(15) == 0
    assert time.monotonic() - started < 8.0
    thread.join(10)
    ((finish, done, error),) = results  # type: ignore[misc]
    assert (error is not None or finish) and not (done and error), "the stream ended without saying why"
    server.check_gone(family, 1.0)
    server.close()


def test_a_second_signal_ends_at_once(server: Server) -> None:
    results: list[object] = []
    thread = stream(server, 1900, results)
    until(lambda: server.figures()["running"] == 1)
    family = server.processes()
    server.signal(signal.SIGINT)
    time.sleep(0.3)
    server.signal(signal.SIGINT)
    started = time.monotonic()
    server.process.wait(10)
    assert time.monotonic() - started < 4.0
    thread.join(10)
    server.check_gone(family, 1.0)


@pytest.mark.parametrize("role", ["engine", "detokenizer"])
def test_a_dead_process_is_told_to_clients_at_once(server: Server, role: str) -> None:
    results: list[object] = []
    thread = stream(server, 1900, results)
    until(lambda: server.figures()["running"] == 1)
    family = server.processes()
    (victim,) = (process for process in family if role in " ".join(process.cmdline()))
    started = time.monotonic()
    victim.kill()
    thread.join(2.0)
    assert not thread.is_alive(), "the client waited for more than 2 s"
    ((_, done, error),) = results  # type: ignore[misc]
    assert error is not None and not done
    assert server.health() == 503
    assert server.process.wait(15) == 1, server.log()
    assert time.monotonic() - started < 12.0
    server.check_gone(family, 1.0)


def test_children_die_with_their_parent(model: Path) -> None:
    server = Server(model)
    results: list[object] = []
    thread = stream(server, 1900, results)
    until(lambda: server.figures()["running"] == 1)
    family = server.processes()
    server.process.kill()
    _, alive = psutil.wait_procs(family, timeout=5.0)
    assert not alive, f"left behind: {alive}"
    thread.join(10)
    server.process.wait()
    again = Server(model, port=server.port)
    assert again.text(prompt="Hello", max_tokens=2, ignore_eos=True)
    again.stop()
    server.close()


def test_a_port_in_use_is_one_line(model: Path, tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        started = time.monotonic()
        command = [sys.executable, "-m", "radixlm", "serve", str(model), "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(tmp_path), timeout=30)
    assert done.returncode == 2
    assert time.monotonic() - started < 5.0
    (line,) = [line for line in done.stderr.splitlines() if "error" in line]
    assert str(port) in line and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no-such-model"], "no-such-model"),
        (["smollm2", "--load-format", "dummy", "--context-length", "99999999"], "context"),
        (["smollm2", "--attention-backend", "flash9"], "flash9"),
        (["smollm2", "--bogus"], "--bogus"),
    ],
)
def test_what_cannot_start_says_why_in_one_line(arguments: list[str], words: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "radixlm", "serve", "--port", "0", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(tmp_path), timeout=60)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert any(words in line and "error" in line for line in done.stderr.splitlines()), done.stderr
    assert not list(tmp_path.iterdir())


def test_two_hundred_streams_of_which_half_disconnect(server: Server) -> None:
    """The pool returns to its start, nobody generates for a client who left, and the others get what they get alone."""
    rng = random.Random(1)
    prompts = [f"{rng.randrange(10**6)} words and {rng.randrange(10**6)} more" for _ in range(20)]
    alone = [server.text(prompt=prompt, max_tokens=40, ignore_eos=True) for prompt in prompts]
    server.flush()
    before = server.figures()
    wrong: list[str] = []

    def ask(index: int) -> None:
        prompt = prompts[index % 20]
        body = {"model": server.model, "prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        limit = rng.randrange(0, 38) if index % 2 else None
        got = ""
        with server.open("/v1/completions", body) as events:
            for count, event in enumerate(events):
                got += event["choices"][0]["text"] if event["choices"] else ""
                if limit is not None and count >= limit:
                    return
        if limit is None and got != alone[index % 20]:
            wrong.append(f"stream {index} differs from its solo run")

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong
    server.check_settles(3.0)
    after = server.figures()
    time.sleep(0.5)
    assert server.figures()["generation_tokens"] == after["generation_tokens"], "somebody generates for nobody"
    assert after["pool_free"] + after["pool_evictable"] == before["pool_free"] + before["pool_evictable"]
    server.flush()
    assert server.figures()["pool_free"] == before["pool_total"]
    server.stop()
