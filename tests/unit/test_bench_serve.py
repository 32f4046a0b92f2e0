"""The load generator and `radixlm bench serve` against a small server that speaks OpenAI's streaming protocol."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from radixlm.base.errors import BadRequest, StartupError, Unavailable
from radixlm.bench import main as bench
from radixlm.bench import plot
from radixlm.bench.datasets import Session, Turn
from radixlm.bench.loadgen import Clock, Load, Record, Run, Said, run
from radixlm.bench.summary import summarise
from radixlm.bench.target import CHAT, COMPLETIONS, HttpTarget
from radixlm.cli.main import main as radixlm
from radixlm.client.http import Client


class Server:
    """An OpenAI-compatible server in a thread: every token is a word of its own chunk, after `gap` seconds.

    Attributes:
        bodies: the generating requests, in the order they came.
        most: the most requests that were in flight at once.
        fail: answers 500 to prompts that contain this text.
        breaks: closes the connection after the first token of prompts that contain this text.
        knows_tokens: serves /tokenize (ids are lengths of words).
    """

    def __init__(self) -> None:
        self.gap = 0.0
        self.bodies: list[dict[str, Any]] = []
        self.calls: Counter[str] = Counter()
        self.most = self._running = 0
        self.fail = self.breaks = "\0"
        self.knows_tokens = True
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def close(self) -> None:
        async def stop() -> None:
            self._server.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = [
                    line.split(":")[1] for line in head.lower().split("\r\n") if line.startswith("content-length")
                ]
                body = await reader.readexactly(int(length[0]) if length else 0)
                path = head.split()[1]
                self.calls[path] += 1
                await self._answer(path, json.loads(body) if body else {}, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if path in (COMPLETIONS, CHAT):
            self.bodies.append(body)
            self._running += 1
            self.most = max(self.most, self._running)
            try:
                await self._generate(body, path == CHAT, writer)
            finally:
                self._running -= 1
        elif path == "/v1/models":
            self._plain(writer, {"data": [{"id": "tiny"}]})
        elif path == "/tokenize" and self.knows_tokens:
            self._plain(writer, {"tokens": [len(word) for word in body["prompt"].split()]})
        elif path == "/flush_cache":
            self._plain(writer, None)
        else:
            self._plain(writer, {"error": {"message": "no such route"}}, "404 Not Found")
        await writer.drain()

    def _plain(self, writer: asyncio.StreamWriter, content: Any, status: str = "200 OK") -> None:
        body = b"" if content is None else json.dumps(content).encode()
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)

    async def _generate(self, body: dict[str, Any], chat: bool, writer: asyncio.StreamWriter) -> None:
        said = body["messages"] if chat else body["prompt"]
        prompt = json.dumps(said)
        if self.fail in prompt:
            self._plain(writer, {"error": {"message": "the model fell over"}}, "500 Internal Server Error")
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")

        def event(content: dict[str, Any] | str) -> None:
            data = content if isinstance(content, str) else json.dumps({"id": "x", "model": "tiny", **content})
            payload = f"data: {data}\n\n".encode()
            writer.write(b"%x\r\n%b\r\n" % (len(payload), payload))

        if chat:
            event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        for i in range(body["max_tokens"]):
            await asyncio.sleep(self.gap)
            piece = {"delta": {"content": f" w{i}"}} if chat else {"text": f" w{i}"}
            event({"choices": [{"index": 0, "finish_reason": None, **piece}], "usage": None})
            await writer.drain()
            if self.breaks in prompt:
                writer.close()
                return
        event({"choices": [{"index": 0, "finish_reason": "length", **({"delta": {}} if chat else {"text": ""})}]})
        words = len(said) if isinstance(said, list) and not chat else len(prompt.split())
        usage = {"prompt_tokens": words, "completion_tokens": body["max_tokens"]}
        event({"choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": words // 2}}})
        event("[DONE]")
        writer.write(b"0\r\n\r\n")


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def sessions(*turns: Sequence[tuple[str, int]]) -> list[Session]:
    return [Session(tuple(Turn(n, text=text) for text, n in session)) for session in turns]


def generate(url: str, load: Load, asked: Sequence[Session], route: str = COMPLETIONS) -> Run:
    async def scene() -> Run:
        async with Client(url) as client, asyncio.timeout(60):
            return await run(HttpTarget(client, "tiny", route, {"temperature": 0.0}), asked, load)

    return asyncio.run(scene())


# ---- arrivals


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_are_gamma_distributed(burstiness: float) -> None:
    due = Load(rate=20.0, burstiness=burstiness, seed=5).arrivals(20_000)
    gaps = [b - a for a, b in itertools.pairwise(due)]
    assert due[0] == 0.0 and min(gaps) >= 0
    assert statistics.fmean(gaps) == pytest.approx(1 / 20, rel=0.06)
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(1 / math.sqrt(burstiness), rel=0.06)


def test_other_arrivals() -> None:
    assert Load(rate=4.0, burstiness=math.inf).arrivals(4) == [0.0, 0.25, 0.5, 0.75]
    assert Load().arrivals(3) == [0.0, 0.0, 0.0]
    assert Load(rate=1.0, seed=1).arrivals(9) == Load(rate=1.0, seed=1).arrivals(9)
    assert Load(rate=1.0, seed=1).arrivals(9) != Load(rate=1.0, seed=2).arrivals(9)


@pytest.mark.parametrize("wrong", [{"rate": 0.0}, {"rate": math.nan}, {"burstiness": -1.0}, {"max_concurrency": 0}])
def test_bad_loads(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        Load(**wrong)


# ---- the generator, with a target of known speed


class Stalling:
    """Answers at once, except that one request holds up all of them, as a server that stalls does."""

    def __init__(self, seconds: float, stalls: int) -> None:
        self._seconds = seconds
        self._stalls = stalls
        self._lock = asyncio.Lock()

    async def send(self, said: Sequence[Said], turn: Turn, record: Record, clock: Clock) -> str:
        async with self._lock:
            await asyncio.sleep(self._seconds if record.session == self._stalls else 0.0)
        record.stamps.append(clock())
        record.end = clock()
        record.output_tokens = 1
        return ""


def test_a_stall_is_seen_by_every_request_that_was_due() -> None:
    async def scene() -> Run:
        load = Load(rate=100.0, burstiness=math.inf)
        return await run(Stalling(0.3, stalls=0), sessions(*[[("x", 1)]] * 30), load)

    measured = asyncio.run(scene())
    assert [record.due for record in measured.records] == pytest.approx([i / 100 for i in range(30)])
    waits = [record.first - record.due for record in measured.records]
    # due every 10 ms while the server stalls for 300: the waits fall by 10 ms each; only the first is slow by itself
    assert all(wait >= 0.3 - i / 100 - 0.005 for i, wait in enumerate(waits))
    summary = summarise(measured)
    assert summary.ttft is not None and summary.ttft.mean > 140


def test_under_a_bound_latency_counts_from_when_it_was_due() -> None:
    async def scene(load: Load) -> Run:
        return await run(Stalling(0.2, stalls=0), sessions(*[[("x", 1)]] * 5), load)

    paced = asyncio.run(scene(Load(rate=1000.0, burstiness=math.inf, max_concurrency=1)))
    assert all(record.due == pytest.approx(i / 1000) for i, record in enumerate(paced.records))
    assert all(record.sent - record.due > 0.19 for record in paced.records[1:])
    closed = asyncio.run(scene(Load(max_concurrency=1)))
    assert all(record.due > 0.19 for record in closed.records[1:])  # when the slot was free


# ---- over HTTP


def test_records_of_a_stream(server: Server) -> None:
    server.gap = 0.02
    measured = generate(server.url, Load(), sessions([("one two three", 6)]))
    (record,) = measured.records
    assert (record.error, record.input_tokens, record.output_tokens, record.cached_tokens) == (None, 3, 6, 1)
    assert len(record.stamps) == 6 and list(record.stamps) == sorted(record.stamps)
    assert all(stamp - record.sent > 0.019 * (i + 1) for i, stamp in enumerate(record.stamps))
    assert record.last <= record.end <= measured.seconds + 1e-9
    assert server.bodies == [
        {"model": "tiny", "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.0,
         "prompt": "one two three", "max_tokens": 6}
    ]  # fmt: skip


def test_concurrency_is_bounded(server: Server) -> None:
    server.gap = 0.02
    asked = sessions(*[[(f"p{i}", 3)] for i in range(20)])
    assert len(generate(server.url, Load(max_concurrency=3), asked).records) == 20
    assert server.most == 3
    generate(server.url, Load(), asked)
    assert server.most > 3


def test_history_grows_with_the_answers(server: Server) -> None:
    asked = sessions([("a", 2), ("b", 1), ("c", 1)])
    generate(server.url, Load(), asked)
    assert [body["prompt"] for body in server.bodies] == ["a", "a\n w0 w1\nb", "a\n w0 w1\nb\n w0\nc"]
    server.bodies.clear()
    measured = generate(server.url, Load(), asked, CHAT)
    assert [len(record.stamps) for record in measured.records] == [2, 1, 1]  # the role alone is no token
    assert server.bodies[-1]["messages"] == [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": " w0 w1"},
        {"role": "user", "content": "b"}, {"role": "assistant", "content": " w0"},
        {"role": "user", "content": "c"},
    ]  # fmt: skip
    dues = [record.due for record in measured.records]
    assert dues[1:] == [record.end for record in measured.records[:-1]]


def test_failures_are_counted_and_end_their_session_only(server: Server) -> None:
    server.fail, server.breaks = "broken", "torn"
    asked = sessions([("fine", 2)], [("broken", 2), ("never sent", 2)], [("torn", 2)])
    measured = generate(server.url, Load(), asked)
    errors = {(record.session, record.turn): record.error for record in measured.records}
    assert errors[0, 0] is None
    assert errors[1, 0] is not None and "answered 500: the model fell over" in errors[1, 0]
    assert errors[1, 1] is not None and "earlier turn" in errors[1, 1]
    assert errors[2, 0] is not None and "closed the connection before its answer was complete" in errors[2, 0]
    assert len(server.bodies) == 3
    assert (summarise(measured).completed, summarise(measured).failed) == (1, 3)


def test_an_answer_without_tokens_is_a_failure(server: Server) -> None:
    (record,) = generate(server.url, Load(), sessions([("x", 0)])).records
    assert record.error == "the answer holds no token"


# ---- the verb


def bench_serve(server: Server, *argv: str) -> int:
    return radixlm(["bench", "serve", "--url", server.url, *argv])


def test_serve_end_to_end(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.gap = 0.001
    result, picture = tmp_path / "r.json", tmp_path / "p.png"
    code = bench_serve(
        server, "--dataset-name", "generated-shared-prefix", "--num-prompts", "12", "--gsp-num-groups", "3",
        "--shared-len", "40", "--own-len", "8", "--output-len", "5", "--request-rate", "500", "--seed", "7",
        "--ignore-eos", "--flush-cache", "--slo", "ttft:5000", "--save-result", str(result), "--save-detailed",
        "--plot", str(picture), "--extra-request-body", '{"top_k": 3}',
    )  # fmt: skip
    out = capsys.readouterr().out
    assert code == 0 and "shared-prefix on tiny" in out
    for word in ("TTFT", "TPOT", "ITL", "E2E", "p99", "output throughput", "goodput", "288 (50.0%)"):
        assert word in out, word
    loaded = json.loads(result.read_text())
    assert (loaded["completed"], loaded["output_tokens"], loaded["input_tokens"]) == (12, 60, 12 * 48)
    assert loaded["seed"] == 7 and loaded["dataset"]["source"].startswith("pydoc_data.topics")
    assert loaded["load"]["request_rate"] == 500 and loaded["slo_ms"] == {"ttft": 5000}
    assert len(loaded["requests"]) == 12 and len(loaded["requests"][0]["stamps_s"]) == 5
    assert picture.read_bytes().startswith(b"\x89PNG")
    measured = server.bodies[1:]  # after the warm-up
    assert len(measured) == 12 and server.calls["/flush_cache"] == 1
    assert len({tuple(body["prompt"][:40]) for body in measured}) == 3
    assert all(body["ignore_eos"] and body["top_k"] == 3 and len(body["prompt"]) == 48 for body in measured)


def test_the_same_seed_asks_the_same(server: Server) -> None:
    argv = ("--num-prompts", "5", "--input-len", "20", "--output-len", "2", "--request-rate", "inf")
    assert bench_serve(server, *argv) == bench_serve(server, *argv) == 0
    half = len(server.bodies) // 2
    first, second = ({str(body["prompt"]) for body in part} for part in (server.bodies[:half], server.bodies[half:]))
    assert first == second and len(first) == 6


def test_text_prompts_where_nobody_counts_tokens(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.knows_tokens = False
    assert bench_serve(server, "--num-prompts", "2", "--input-len", "30", "--output-len", "2") == 0
    assert all(isinstance(body["prompt"], str) and len(body["prompt"]) > 50 for body in server.bodies)
    assert "lengths approximate" in capsys.readouterr().err


def test_random_ids_and_chat(server: Server) -> None:
    assert (
        bench_serve(server, "--num-prompts", "2", "--input-len", "9", "--vocab-size", "500", "--output-len", "1") == 0
    )
    assert all(max(body["prompt"]) < 500 for body in server.bodies)
    server.bodies.clear()
    argv = ("--endpoint", "chat", "--dataset-name", "multi-turn", "--num-turns", "3", "--output-len", "2")
    assert bench_serve(server, *argv, "--num-prompts", "2", "--input-len", "9") == 0
    assert sorted(len(body["messages"]) for body in server.bodies) == [1, 1, 1, 3, 3, 5, 5]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--plot", "x.bmp"], "must end in .png, .svg, .pdf"),
        (["--plot", "/nowhere/x.png"], "no directory"),
        (["--save-result", "/nowhere/x.json"], "no file can be written"),
        (["--slo", "speed:1"], "is no objective"),
        (["--request-rate", "0"], "request-rate is 0"),
        (["--num-prompts", "0"], "--num-prompts is 0"),
        (["--dataset-name", "custom"], "--dataset-path"),
        (["--extra-request-body", "[1]"], "not a JSON object"),
        (["--num-promts", "1"], "--num-prompts"),
        (["--tokenizer", "/nowhere"], "no tokenizer at"),
    ],
)
def test_bad_input_is_one_line(
    server: Server, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_serve(server, *argv) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and not captured.out
    assert not server.bodies


def test_a_server_that_fails_is_told_before_the_load(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.fail = ""  # every prompt contains it
    assert bench_serve(server, "--num-prompts", "50") == 2
    assert "the warm-up request failed" in capsys.readouterr().err
    assert len(server.bodies) == 1
    assert bench_serve(server, "--num-prompts", "3", "--warmup-requests", "0") == 1
    assert "3 x " in capsys.readouterr().out


def test_nobody_listens(server: Server) -> None:
    url, server_gone = server.url.rsplit(":", 1)[0] + ":1", pytest.raises(Unavailable, match="is the server running")
    with server_gone:
        bench.main(["serve", "--url", url])


def test_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(kind in out for kind in bench.KINDS)
    with pytest.raises(StartupError, match="did you mean offline"):
        bench.main(["ofline"])
    for kind in bench.KINDS:
        assert radixlm(["bench", kind, "--help"]) == 0
        assert f"radixlm bench {kind}" in capsys.readouterr().out


def test_plot_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(StartupError, match=r"pip install 'radixlm\[plot\]'"):
        plot.require(tmp_path / "x.png")


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_plots_of_odd_runs(tmp_path: Path, ending: str) -> None:
    lone = Record(session=0, turn=0, due=0.0, sent=0.0, wanted=1, end=time.get_clock_info("monotonic").resolution)
    for records in ([], [lone]):
        path = tmp_path / f"{len(records)}.{ending}"
        plot.plot(Run(records, 0.0), "odd", path)
        assert path.stat().st_size > 1000
