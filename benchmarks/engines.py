"""This module owns the engines that workloads run on, each in a process of its own, and the talk with that process.

A worker reads JSON lines: `{"requests": [[ids, tokens wanted], ...]}`, all submitted at once, or an empty object to
end. It answers each with a JSON line. Its time starts when the line is decoded and ends before the answer is encoded.

A further engine is a subclass of `Engine` in `ENGINES`; a server that speaks OpenAI's completions (prompt as token ids,
stream, `ignore_eos`) needs no code: `--engines http --command "... {port} ..."`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import IO, Any


@dataclass
class Request:
    """Token ids in, number of tokens wanted out."""

    ids: list[int]
    count: int


@dataclass
class Answer:
    """Times are seconds after the whole group was submitted. `first` is unknown where an engine does not stream.

    Attributes:
        head: the first token ids, or the first text, to see that engines agree.
    """

    count: int
    first: float | None
    last: float
    head: list[int] | str


class Engine:
    """`start` brings the model up; `run` submits all requests at once and waits for all."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.started: float | None = None  # `time.time()`, where it is not the start of the worker

    def start(self) -> None: ...

    def run(self, requests: list[Request]) -> list[Answer]:
        raise NotImplementedError

    def stop(self) -> None: ...

    def root(self) -> int:
        """The process whose tree is the engine."""
        return os.getpid()

    def info(self) -> dict[str, Any]:
        return {}


class RadixLM(Engine):
    """Our engine, in process, streamed."""

    def start(self) -> None:
        from radixlm import Engine as InProcess

        named = {"model": self.options.model, "dtype": self.options.dtype, "threads": self.options.threads}
        self._engine = InProcess(**named, **self.options.options)
        self._loop = asyncio.new_event_loop()

    def run(self, requests: list[Request]) -> list[Answer]:
        return self._loop.run_until_complete(self._all(requests))

    async def _all(self, requests: list[Request]) -> list[Answer]:
        started = time.perf_counter()
        return await asyncio.gather(*(self._one(request, started) for request in requests))

    async def _one(self, request: Request, started: float) -> Answer:
        # Two messages a request, its first token and its end: the other engines in process do not stream either.
        params = {
            "temperature": 0.0,
            "max_new_tokens": request.count,
            "ignore_eos": True,
            "stream_interval": request.count,
        }
        first: float | None = None
        last = 0.0
        ids: list[int] = []
        async for answer in await self._engine.async_generate(None, params, input_ids=request.ids, stream=True):
            last = time.perf_counter() - started
            first = last if first is None else first
            ids = answer["output_ids"]
        return Answer(len(ids), first, last, ids[:12])

    def stop(self) -> None:
        self._engine.shutdown()
        self._loop.close()

    def info(self) -> dict[str, Any]:
        facts = self._engine.facts
        choices = {name: choice for name, (choice, _) in facts.decisions.items()}
        return {"dtype": facts.model.dtype, "threads": facts.device.threads, "decisions": choices}


class Transformers(Engine):
    """`transformers` generate(): one static batch for each length, no prefix reuse."""

    def start(self) -> None:
        import torch
        import transformers

        torch.set_num_threads(self.options.threads)
        transformers.logging.set_verbosity_error()
        self._torch, self._version = torch, transformers.__version__
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            self.options.model, dtype=getattr(torch, self.options.dtype), attn_implementation="sdpa"
        ).eval()

    def run(self, requests: list[Request]) -> list[Answer]:
        started = time.perf_counter()
        answers: list[Answer | None] = [None] * len(requests)
        groups: dict[tuple[int, int], list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault((len(request.ids), request.count), []).append(index)
        for (_, count), members in groups.items():
            for at in range(0, len(members), self.options.batch):
                part = members[at : at + self.options.batch]
                new, stamps = self._generate([requests[index].ids for index in part], count, started)
                for index, ids in zip(part, new, strict=True):
                    # the first stamp is the prompt, the second the first new token
                    answers[index] = Answer(len(ids), stamps[1] if len(stamps) > 1 else None, stamps[-1], ids[:12])
        return [answer for answer in answers if answer is not None]

    def _generate(self, prompts: list[list[int]], count: int, started: float) -> tuple[list[list[int]], list[float]]:
        stamps: list[float] = []

        class Streamer:  # generate() feeds one for a batch of one only
            def put(self, value: Any) -> None:
                stamps.append(time.perf_counter() - started)

            def end(self) -> None: ...

        ids = self._torch.tensor(prompts)
        with self._torch.inference_mode():
            sequences = self._model.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=count,
                min_new_tokens=count,
                streamer=Streamer() if len(prompts) == 1 else None,
            )
        stamps = stamps or [time.perf_counter() - started]
        return sequences[:, ids.shape[1] :].tolist(), stamps

    def info(self) -> dict[str, Any]:
        return {"transformers": self._version, "torch": self._torch.__version__, "batch": self.options.batch}


class Http(Engine):
    """A server in a process of its own, or one that is up, through our own client."""

    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        from radixlm.client.http import Client

        self._loop = asyncio.new_event_loop()
        if self.options.command is None:
            self._client = Client(self.options.url)
            return
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        words = shlex.split(
            self.options.command.format(port=port, model=self.options.model, threads=self.options.threads)
        )
        self._client = Client(f"http://127.0.0.1:{port}")
        self.started = time.time()
        self.process = subprocess.Popen(words, stdout=sys.stderr, start_new_session=True)
        deadline = time.time() + self.options.start_timeout
        while not self._loop.run_until_complete(self._client.health()):
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}")
            if time.time() > deadline:
                raise TimeoutError("the server did not come up")
            time.sleep(0.02)

    def run(self, requests: list[Request]) -> list[Answer]:
        return self._loop.run_until_complete(self._all(requests))

    async def _all(self, requests: list[Request]) -> list[Answer]:
        model = self.options.served_name or await self._client.model()
        started = time.perf_counter()
        return await asyncio.gather(*(self._one(request, model, started) for request in requests))

    async def _one(self, request: Request, model: str, started: float) -> Answer:
        first: float | None = None
        last = 0.0
        text, count = "", 0
        fields = {"max_tokens": request.count, "temperature": 0, "ignore_eos": True}
        async for chunk in self._client.stream_completions(request.ids, model=model, **fields):
            now = time.perf_counter() - started
            piece = "".join(choice.get("text") or "" for choice in chunk.get("choices") or ())
            if piece:
                first, last = now if first is None else first, now
                text += piece
            count = (chunk.get("usage") or {}).get("completion_tokens", count)
        return Answer(count, first, last or time.perf_counter() - started, text[:60])

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)  # the group that was started above, nobody else
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(10)

    def root(self) -> int:
        return self.process.pid if self.process else os.getpid()

    def info(self) -> dict[str, Any]:
        return {"command": self.options.command, "url": self.options.url}


ENGINES = {"radixlm": RadixLM, "hf": Transformers, "http": Http}


def work(name: str, options: argparse.Namespace) -> None:
    """A worker's life."""
    # what libraries print must not come between the answers
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**answer: Any) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a server is stopped too
    engine = ENGINES[name](options)
    try:
        try:
            engine.start()
        except Exception as error:
            say(error=f"{type(error).__name__}: {error}"[:500])
            return
        say(root=engine.root(), info=engine.info(), started=engine.started)
        for line in sys.stdin:
            asked = json.loads(line)
            if not asked:
                return
            requests = [Request(ids, count) for ids, count in asked["requests"]]
            started = time.perf_counter()
            try:
                done = engine.run(requests)
            except Exception as error:
                say(error=f"{type(error).__name__}: {error}"[:500])
                continue
            say(seconds=time.perf_counter() - started, answers=[asdict(answer) for answer in done])
    finally:
        engine.stop()


class Worker:
    """An engine's process, seen from the outside."""

    def __init__(self, name: str, argv: list[str]) -> None:
        self.name = name
        spawned = time.time()
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        ready = self._read()
        self.ready = time.time()
        self.started: float = ready["started"] or spawned
        self.root: int = ready["root"]
        self.info: dict[str, Any] = ready["info"]

    def run(self, requests: list[Request]) -> tuple[float, list[Answer]]:
        """(seconds, answers) of a group of requests."""
        self._write({"requests": [[request.ids, request.count] for request in requests]})
        said = self._read()
        return said["seconds"], [Answer(**answer) for answer in said["answers"]]

    def close(self) -> None:
        if self._process.poll() is None:
            self._write({})
        try:
            self._process.wait(40)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait(30)

    def _write(self, message: dict[str, Any]) -> None:
        pipe: IO[str] | None = self._process.stdin
        assert pipe is not None
        pipe.write(json.dumps(message) + "\n")
        pipe.flush()

    def _read(self) -> dict[str, Any]:
        pipe: IO[str] | None = self._process.stdout
        assert pipe is not None
        line = pipe.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with {self._process.wait()}")
        said: dict[str, Any] = json.loads(line)
        if "error" in said:
            raise RuntimeError(f"{self.name}: {said['error']}")
        return said
