"""The real app in front of a deterministic engine: HTTP without sockets, the real detokenizer, no model."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import tempfile
import zlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

import numpy as np
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from radixlm.api.app import build_app
from radixlm.api.hub import Hub
from radixlm.api.service import Served
from radixlm.api.start import start
from radixlm.api.witness import witnesses
from radixlm.base.facts import DeviceFacts, EngineFacts, ModelFacts, PoolFacts
from radixlm.base.request import Request
from radixlm.config.schema import Config
from radixlm.observe.metrics import Metrics
from radixlm.text.parsers.choose import Formats, choose
from radixlm.text.template import ChatTemplate
from radixlm.text.tokenizer import Tokenizer
from radixlm.text.worker import Detokenizer
from radixlm.wire.codec import Decoder, encode
from radixlm.wire.messages import (
    Begin,
    Cancel,
    Drain,
    EndSession,
    Extra,
    Failed,
    Fault,
    Finish,
    Query,
    Ready,
    Reply,
    Scores,
    Stats,
    Stop,
    Submit,
    Texts,
    ToApi,
    ToDetokenizer,
    ToEngine,
    Tokens,
)
from support.errors import error_of

T = TypeVar("T")
Json = dict[str, Any]

CONTEXT = 512
DECODER: Decoder[ToEngine] = Decoder(ToEngine)
CONTROL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'refused' %}{{ raise_exception('no such role here') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}[tools: {{ tools | length }}]{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<quick>{% endif %}{% endif %}"
)
CORPUS = ["The quick brown fox jumps over the lazy dog. one, two, three, four, five\n\nHello world, blue bicycle"] * 3


@cache
def tokenizer() -> Tokenizer:
    """A byte-level vocabulary with ChatML's control words."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens([AddedToken(word, special=True) for word in CONTROL])
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "tokenizer.json"
        backend.save(str(file))
        made = Tokenizer(file, {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"})
        assert made.encode("x", parse_special=False)  # its second form is read from the file as well
    return made


def facts() -> EngineFacts:
    words = tokenizer()
    model = ModelFacts(
        name="tiny", path="/secret/place/tiny", architecture="llama", dtype="float32", parameters=1, layers=1,
        hidden_size=8, vocab_size=words.vocab_size + 16, sampled_vocab_size=words.vocab_size, eos_ids=words.eos_ids,
        bos_id=words.bos_id, context_length=CONTEXT, kv_bytes_per_token=4, weight_bytes=4,
    )  # fmt: skip
    device = DeviceFacts(kind="null", name="none", memory_total=1, memory_free=1, cores=1)
    pool = PoolFacts(pages=4096, page_size=1, max_running=64, bytes=4)
    decisions = {"attention_backend": ("torch_ref", "first choice")}
    return EngineFacts(model=model, device=device, pool=pool, decisions=decisions, timings={"load": 0.1})


@dataclass
class Running:
    request: Request
    ids: list[int]  # what it will say
    said: int = 0


class Engine:
    """The far end of the ring. Says `script` (or tokens drawn from prompt and seed), one token a turn of the loop.

    Attributes:
        script: text that every sequence says, after which it ends with the end token.
        held: sequences are accepted but get no tokens.
        pace: seconds between two turns.
        trouble: called with a request and the count of tokens so far; a fault it returns ends the sequence.
        cached: called with a request: its cached tokens.
        deaf: messages are lost.
    """

    def __init__(self) -> None:
        self.detokenizer = Detokenizer(tokenizer())
        self.script: str | None = None
        self.held = False
        self.deaf = False
        self.pace = 0.0
        self.trouble: Callable[[Request, int], Fault | None] = lambda request, said: None
        self.cached: Callable[[Request], int] = lambda request: 0
        self.requests: list[Request] = []
        self.cancelled: list[tuple[int, str]] = []
        self.closed: list[str] = []  # sessions
        self.drained: float | None = None
        self.running: dict[int, Running] = {}
        self.tokens = 0
        self.receive: Callable[[list[ToApi]], None] = lambda messages: None
        self._turning = False

    def send(self, message: ToEngine) -> None:
        if self.deaf:
            return
        message = DECODER.decode(encode(message))  # as on a socket
        loop = asyncio.get_running_loop()
        if isinstance(message, Submit):
            self._accept(message.request)
        elif isinstance(message, Cancel):
            for uid in message.uids:
                self.cancelled.append((uid, message.reason))
                loop.call_soon(self._end, uid, Finish("abort", None, message.reason))
        elif isinstance(message, Stop):
            self.running.pop(message.uid, None)
            loop.call_soon(self._tell, [Tokens(b"", b"", [Extra(message.uid, finish=Finish("stop"))])])
        elif isinstance(message, Query):
            loop.call_soon(self.receive, [self._answer(message)])
        elif isinstance(message, EndSession):
            self.closed.append(message.session)
        elif isinstance(message, Drain):
            self.drained = message.seconds
        self._wake()

    def close(self) -> None:
        pass

    def _answer(self, query: Query) -> Reply:
        if query.what == "flush" and self.running:
            return Reply(query.ticket, {}, Fault(400, "busy", "1 requests are running"))
        if query.what == "flush":
            return Reply(query.ticket, {"flushed_tokens": 7})
        return Reply(query.ticket, {"running": len(self.running), "generation_tokens": self.tokens, "pool_total": 10})

    def _accept(self, request: Request) -> None:
        self.requests.append(request)
        self.running[request.uid] = Running(request, speech(request, self.script))
        self._later([Begin(request.uid, len(request.tokens), request.text)])

    def _later(self, messages: list[ToDetokenizer]) -> None:
        asyncio.get_running_loop().call_soon(self._tell, messages)

    def _tell(self, messages: list[ToDetokenizer]) -> None:
        texts, stops = self.detokenizer.handle(messages)
        if texts is not None:
            self.receive([Texts(texts.deltas)])
        for stop in stops:
            self.send(stop)

    def _end(self, uid: int, finish: Finish) -> None:
        running = self.running.pop(uid, None)
        if running is not None:
            self._tell([Tokens(b"", b"", [Extra(uid, finish=finish, stats=self._stats(running))])])

    def _wake(self) -> None:
        if not self._turning and not self.held and self.running:
            self._turning = True
            asyncio.get_running_loop().call_later(self.pace, self.turn)

    def release(self) -> None:
        self.held = False
        self._wake()

    def turn(self) -> None:
        """One step: a token for every sequence."""
        self._turning = False
        uids, ids, extras, failed = [], [], [], []
        for uid, running in list(self.running.items()):
            fault = self.trouble(running.request, running.said)
            if fault is not None:
                failed.append(Failed(uid, fault))
                del self.running[uid]
                continue
            extras.append(self._step(running))
            if running.said <= len(running.ids) and running.ids:
                uids.append(uid)
                ids.append(running.ids[running.said - 1])
                self.tokens += 1
            if extras[-1].finish is not None:
                del self.running[uid]
        message = Tokens(np.array(uids, "<i8").tobytes(), np.array(ids, "<i4").tobytes(), extras)
        self._tell([message, *failed])
        self._wake()

    def _step(self, running: Running) -> Extra:
        request = running.request
        running.said += 1
        scores = prompt_scores = finish = None
        if request.logprobs is not None:
            if running.said == 1:
                prompt_scores = scores_of_prompt(request)
            if running.ids:
                scores = scores_of(running.ids[running.said - 1 : running.said], request)
        if not running.ids or running.said == len(running.ids):
            last = running.ids[-1] if running.ids else -1
            ended = last in facts().model.eos_ids and not request.sampling.ignore_eos
            ended = ended or last in request.sampling.stop_token_ids
            finish = Finish("stop", last) if ended else Finish("length")
        stats = self._stats(running) if running.said == 1 or finish else None
        vector = vector_of(request).tobytes() if request.pooling and finish else None
        return Extra(request.uid, scores, prompt_scores, finish, stats, vector)

    def _stats(self, running: Running) -> Stats:
        request = running.request
        now = request.arrival
        said = min(running.said, len(running.ids))
        return Stats(len(request.tokens), said, self.cached(request), 0, now, now, now, now)


def speech(request: Request, script: str | None) -> list[int]:
    """What the engine answers: a function of prompt, parameters and seed."""
    sampling, words = request.sampling, tokenizer()
    forced = [token for token, bias in sampling.logit_bias if bias == 100]
    if script is not None:
        ids = [*words.encode(script), words.eos_ids[0]]
    else:
        seed = 0 if sampling.greedy else sampling.seed
        ids = [
            zlib.crc32(f"{request.tokens}{seed}{i}".encode()) % (words.vocab_size - len(CONTROL))
            for i in range(sampling.max_new_tokens)
        ]
    if forced:
        ids = forced * sampling.max_new_tokens
    ids = ids[: sampling.max_new_tokens]
    ends = {*sampling.stop_token_ids} | (set() if sampling.ignore_eos else set(words.eos_ids))
    stop = next((i for i, token in enumerate(ids) if token in ends and i >= sampling.min_new_tokens), len(ids))
    return ids[: stop + 1]


def vector_of(request: Request) -> Any:
    """A vector that is a function of the tokens alone, with a part that they share if they are alike."""
    vector = np.full(facts().model.hidden_size, 0.5, "<f4")
    for token in request.tokens:
        vector[token % len(vector)] += 1.0
    return vector


def logprob(token: int, position: int) -> float:
    return -((token * 7 + position) % 1000) / 100


def scores_of(ids: list[int], request: Request, position: int = 0) -> Scores:
    asked = request.logprobs
    assert asked is not None
    top = [
        [((token + j) % 300, logprob(token, position + i) - j) for j in range(asked.top)] for i, token in enumerate(ids)
    ]
    if asked.top:
        top[0][-1] = (top[0][-1][0], -np.inf)
    picked = [[-float(token % 50) for token in asked.token_ids] for _ in ids]
    return Scores(ids, [logprob(token, position + i) for i, token in enumerate(ids)], top, picked)


def scores_of_prompt(request: Request) -> Scores | None:
    """Scores of the prompt as the engine gives them: nothing for a prompt that is one token long."""
    asked = request.logprobs
    assert asked is not None
    tokens = list(request.tokens)
    if asked.prompt_from < 0 or len(tokens) == 1:
        return None
    begin = max(1, asked.prompt_from)
    scores = scores_of(tokens[begin:], request, begin)
    if asked.prompt_from == 0:
        return Scores(tokens, [None, *scores.chosen], [[], *scores.top], [[], *scores.picked])
    return scores


# ---- HTTP


@dataclass
class Answer:
    """A whole HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body, parse_constant=_refuse_constant)

    @property
    def error(self) -> Json:
        """The error of an answer, whose shape is checked on the way."""
        assert self.headers["content-type"] == "application/json"
        assert "x-request-id" in self.headers
        found = error_of(self.json)
        assert isinstance(found.get("code", ""), str) and found["message"]
        return found

    @property
    def events(self) -> list[Any]:
        """The payloads of an event stream, `[DONE]` and comments as text."""
        return parse_events(self.body)


def parse_named(body: bytes) -> list[Json]:
    """The payloads of a stream of events with names; each name is the payload's type."""
    blocks = body.decode().split("\n\n")
    assert blocks.pop() == "", "a stream ends with a blank line"
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: "), parse_constant=_refuse_constant))
        assert name == f"event: {events[-1]['type']}" and data.startswith("data: ")
    return events


def parse_events(body: bytes) -> list[Any]:
    blocks = body.decode().split("\n\n")
    assert blocks.pop() == "", "a stream ends with a blank line"
    events: list[Any] = []
    for block in blocks:
        assert "\n" not in block
        if block.startswith(":"):
            events.append(block)
            continue
        assert block.startswith("data: ")
        data = block.removeprefix("data: ")
        events.append(data if data == "[DONE]" else json.loads(data, parse_constant=_refuse_constant))
    return events


def _refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


class Call:
    """One request in progress. `paused` holds back the reading of the answer; `disconnect` breaks the connection."""

    def __init__(self, app: Any, scope: Json, chunks: list[bytes]) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.sends = 0
        self._chunks = chunks
        self._gone = asyncio.Event()
        self._reading = asyncio.Event()
        self._reading.set()
        self._news = asyncio.Event()
        self.task = asyncio.create_task(app(scope, self._receive, self._send))
        self.task.add_done_callback(lambda task: self._news.set())

    @property
    def unread(self) -> int:
        """Pieces of the body that the server did not ask for."""
        return len(self._chunks)

    async def _receive(self) -> Json:
        if self._chunks:
            return {"type": "http.request", "body": self._chunks.pop(0), "more_body": bool(self._chunks)}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Json) -> None:
        await self._reading.wait()
        if message["type"] == "http.response.start":
            assert not self.status, "an answer starts once"
            self.status = message["status"]
            self.headers = {key.decode().lower(): value.decode() for key, value in message["headers"]}
        else:
            assert self.status, "an answer starts with its headers"
            self.sends += 1
            self.body += message.get("body", b"")
            if not message.get("more_body"):
                self._gone.set()
        self._news.set()

    def hold_body(self) -> None:
        """The rest of the body never comes."""
        self._chunks.clear()

    def pause(self) -> None:
        self._reading.clear()

    def resume(self) -> None:
        self._reading.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something holds that depends on what was sent."""
        while not condition():
            assert not self.task.done(), self.body
            self._news.clear()
            await self._news.wait()

    async def events(self, count: int) -> None:
        await self.until(lambda: self.body.count(b"\n\n") >= count)

    async def disconnect(self) -> None:
        self._gone.set()
        self._reading.set()
        await self.task

    async def end(self) -> Answer:
        await self.task
        return Answer(self.status, self.headers, self.body)


@dataclass
class Api:
    """A server of its own: hub, engine, app and event loop. Use it within `with`.

    Attributes:
        changes: branch of the configuration -> fields that differ, e.g. `{"server": {"api_key": "k"}}`.
        formats: in which the model is said to write calls and reasoning; by the template where None.
    """

    changes: dict[str, Json] = field(default_factory=dict)
    ready: bool = True
    template: str | None = TEMPLATE
    sampling: dict[str, float | int] = field(default_factory=dict)
    formats: Formats | None = None

    def __enter__(self) -> Api:
        config = Config()
        for branch, fields in self.changes.items():
            config = dataclasses.replace(config, **{branch: dataclasses.replace(getattr(config, branch), **fields)})
        self.config = config
        words = tokenizer()
        self.engine = Engine()
        self.metrics = Metrics("tiny")
        self.hub = Hub(self.engine, witnesses=witnesses(config.observe, self.metrics))
        self.engine.receive = self.hub.receive
        template = ChatTemplate(self.template, control_words=CONTROL) if self.template is not None else None
        formats = self.formats or choose(self.template or "")
        self.served = Served(("tiny", "org/tiny"), words, template, self.sampling, formats)
        self.app = build_app(self.hub, self.served, config, self.metrics)
        self.runner = asyncio.Runner()
        self.runner.__enter__()
        if self.ready:
            self.run(self.start())
        return self

    def __exit__(self, *exception: Any) -> None:
        self.runner.__exit__(*exception)

    async def start(self) -> None:
        self.hub.receive([Ready("engine", facts()), Ready("detokenizer")])
        await start(self.hub, warm_up=False)

    def run(self, work: Coroutine[Any, Any, T], seconds: float = 20.0) -> T:
        async def bounded() -> T:
            async with asyncio.timeout(seconds):
                return await work

        return self.runner.run(bounded())

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Json | None = None,
        raw: bytes | None = None,
        root: str = "",
    ) -> Call:
        """Begin a request; needs the loop to run."""
        data = raw if raw is not None else b"" if body is None else json.dumps(body).encode()
        sent = {"host": "test", **({"content-type": "application/json"} if body is not None else {}), **(headers or {})}
        path, _, query = path.partition("?")
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
            "path": unquote(path), "raw_path": path.encode(), "query_string": query.encode(), "root_path": root,
            "headers": [(key.lower().encode(), value.encode()) for key, value in sent.items()],
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 30000), "state": {},
        }  # fmt: skip
        chunks = [data[i : i + 65536] for i in range(0, len(data), 65536)] or [b""]
        return Call(self.app, scope, chunks)

    async def ask(
        self, method: str, path: str, body: Any = None, headers: Json | None = None, raw: bytes | None = None
    ) -> Answer:
        return await self.call(method, path, body, headers, raw).end()

    def post(self, path: str, body: Any = None, headers: Json | None = None, raw: bytes | None = None) -> Answer:
        return self.run(self.ask("POST", path, body, headers, raw))

    def get(self, path: str, headers: Json | None = None) -> Answer:
        return self.run(self.ask("GET", path, None, headers))

    # ---- the generating routes with the fields that are always the same

    def complete(self, **fields: Any) -> Answer:
        return self.post("/v1/completions", {"model": "tiny", "prompt": "Say it:", **fields})

    def chat(self, **fields: Any) -> Answer:
        return self.post(
            "/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], **fields}
        )

    def generate(self, **fields: Any) -> Answer:
        return self.post("/generate", {"text": "Say it:", **fields})

    async def settle(self, turns: int = 5) -> None:
        """Let everything that is ready to run do so."""
        for _ in range(turns):
            await asyncio.sleep(0)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let everything run until something holds."""
        while True:
            if condition():
                return
            await asyncio.sleep(0)

    async def settled(self) -> None:
        """Wait until nothing is in flight."""
        await self.until(lambda: not self.hub.in_flight and not self.engine.running)
