"""This module owns `Engine`: a model in this process. The ring is folded: the same messages, the same loop, in two
threads.

from radixlm import Engine

with Engine(model="smollm2") as engine:
    print(engine.generate("The capital of France is", {"max_new_tokens": 8, "temperature": 0})["text"])
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from radixlm.api.hub import Hub
from radixlm.api.protocols import embeddings, native, score
from radixlm.api.protocols.job import Job
from radixlm.api.reader import ThreadOutbox
from radixlm.api.service import Service
from radixlm.api.start import start
from radixlm.base.errors import BadRequest, RadixError, Unavailable
from radixlm.base.facts import EngineFacts
from radixlm.config.resolve import override
from radixlm.config.schema import Config
from radixlm.engine.build import make_loop
from radixlm.launch.parts import load_served
from radixlm.launch.ranks import started
from radixlm.runner.base import EngineLost
from radixlm.runner.boot import Booted
from radixlm.text.worker import Detokenizer
from radixlm.wire.link import Callback, LocalLink
from radixlm.wire.messages import Drain, Ready, ToDetokenizer, ToEngine

R = TypeVar("R")
Answer = dict[str, Any]
Params = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None


class Engine:
    """A model, its scheduler and its cache in this process.

    Args:
        config: a whole configuration, or None for the defaults.
        options: single options by their flag names with underscores, e.g. `model="smollm2"`, `page_size=16`.

    Raises:
        StartupError: the model cannot be loaded; the message says what to do.
    """

    def __init__(self, config: Config | None = None, **options: Any) -> None:
        config = override(config or Config(), options)
        served = load_served(config, _silent)
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._inbox: LocalLink[ToEngine] = LocalLink()
        self._hub = Hub(self._inbox, roles=("engine",))
        booted: concurrent.futures.Future[Booted] = concurrent.futures.Future()
        detokenizer = Detokenizer(served.tokenizer)
        self._threads = (
            threading.Thread(target=self._serve, name="radixlm-hub", daemon=True),
            threading.Thread(target=self._run, args=(config, booted, detokenizer), name="radixlm-engine", daemon=True),
        )
        for thread in self._threads:
            thread.start()
        try:
            engine = booted.result()
        except BaseException:
            self._stop_hub()
            raise
        self.facts: EngineFacts = engine.facts
        self._service = Service(self._hub, served, engine.config)
        self._wait(start(self._hub, warm_up=False))

    # ---- generating

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Params = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        stream: bool = False,
        **fields: Any,
    ) -> Any:
        """Generate, as the native `/generate` route does, with its fields and answers.

        Args:
            prompt: a text or a list of texts; or `input_ids`, token ids or a list of such lists.
            sampling_params: one mapping for all, or a list with one for each.
            stream: return an iterator of answers, each with the text so far.
            fields: further fields of `/generate`, e.g. `return_logprob=True`.

        Returns:
            An answer ({"text", "output_ids", "meta_info"}), a list of them for a batch or `n > 1`, or an iterator.

        Raises:
            RadixError: what the server would answer with a status of 400 and above.
        """
        body = _body(prompt, sampling_params, input_ids, fields, stream)
        if stream:
            return self._iterate(body)
        return self._wait(self._whole(body))

    async def async_generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Params = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        stream: bool = False,
        **fields: Any,
    ) -> Any:
        """`generate` for asyncio: a coroutine that gives the answers, or with `stream` an asynchronous iterator of
        them.
        """
        body = _body(prompt, sampling_params, input_ids, fields, stream)
        if stream:
            return self._aiterate(body)
        return await asyncio.wrap_future(self._submit(self._whole(body)))

    def chat(
        self, messages: Sequence[Mapping[str, Any]], sampling_params: Params = None, *, stream: bool = False
    ) -> Any:
        """Answer a conversation through the model's chat template; answers as `generate`."""
        return self.generate(None, sampling_params, input_ids=self.render(messages), stream=stream)

    def score(
        self, prompt: str | Sequence[int], continuations: Sequence[str] | Sequence[Sequence[int]]
    ) -> list[dict[str, Any]]:
        """How probable each continuation of the prompt is. One batch, which computes the prompt once.

        Returns:
            For each continuation, in their order: {"logprob": the sum, "mean_logprob", "token_logprobs", "token_ids"}.

        Raises:
            RadixError: what the server's `/v1/score` would answer with a status of 400 and above.
        """
        parts = [part if isinstance(part, str) else list(part) for part in continuations]
        body = {"prompt": prompt if isinstance(prompt, str) else list(prompt), "continuations": parts}
        data: list[dict[str, Any]] = self._wait(self._scores(body))["data"]
        return data

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Token ids of a conversation, ready for the model's answer; the arguments are those of the chat route."""
        template = self._service.served.template
        if template is None:
            raise BadRequest("this model has no chat template; give --chat-template or use generate", param="messages")
        rendered = template.render(
            list(messages),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        return self._service.tokenizer.encode_pieces(rendered.pieces)

    # ---- vectors

    def embed(self, texts: str | Sequence[str] | None = None, **fields: Any) -> Any:
        """Vectors of texts, as the native `/encode` route makes them.

        Args:
            texts: a text or a list of texts; or give `input_ids`, token ids or a list of such lists.
            fields: further fields of `/encode`, e.g. `pooling="mean"`, `dimensions=128`.

        Returns:
            An answer ({"embedding", "meta_info"}), or a list of them. Raises as `generate`.
        """
        return self._wait(self._embedded(texts, fields))

    async def async_embed(self, texts: str | Sequence[str] | None = None, **fields: Any) -> Any:
        """`embed` for asyncio."""
        return await asyncio.wrap_future(self._submit(self._embedded(texts, fields)))

    # ---- everything else

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        return list(self._service.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._service.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def flush_cache(self) -> int:
        """Forget every cached prefix. Returns how many tokens were cached. Refused while requests run."""
        return int(self._wait(self._hub.query("flush"))["flushed_tokens"])

    def stats(self) -> dict[str, Any]:
        """Gauges and totals of the scheduler and the cache (see `EngineLoop.snapshot`)."""
        return self._wait(self._hub.query("stats"))

    def audit(self) -> dict[str, Any]:
        """Walk the cache and raise if an invariant is broken; tokens by owner."""
        return self._wait(self._hub.query("audit"))

    def shutdown(self, seconds: float = 0.0) -> None:
        """End the engine. Requests that run get `seconds` to finish. Safe to call again."""
        if self._closed:
            return
        self._closed = True
        try:
            self._submit(self._hub.drain(seconds)).result()
        finally:
            self._threads[1].join(10.0)
            self._stop_hub()
            self._service.workers.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    # ---- the two threads

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def _run(self, config: Config, booted: concurrent.futures.Future[Booted], detokenizer: Detokenizer) -> None:
        """The engine's thread. The model is loaded and warmed up here as well: OpenMP keeps a team of threads for each
        thread that computes, and two teams on the same cores slow each other down.
        """
        to_api = ThreadOutbox(self._loop, self._hub.receive)

        def to_text(message: ToDetokenizer) -> None:
            texts, stops = detokenizer.handle([message])
            for stop in stops:
                self._inbox.send(stop)
            if texts is not None:
                to_api.send(texts)

        def died(reason: str) -> None:
            self._loop.call_soon_threadsafe(self._hub.engine_died, reason)
            self._inbox.send(Drain(0.0))  # an idle loop would wait for requests that are not taken any more

        with contextlib.ExitStack() as stack:
            try:
                engine = stack.enter_context(started(config, _silent, died))
                outbox: Callback[ToDetokenizer] = Callback(to_text)
                loop = make_loop(engine.config, engine.facts, engine.runner, self._inbox, outbox, to_api)
            except BaseException as error:
                stack.close()  # nothing is left behind when the caller hears of it
                booted.set_exception(error)
                return
            booted.set_result(engine)
            to_api.send(Ready("engine", engine.facts))
            try:
                loop.run()
            except EngineLost as error:
                died(str(error))
            except BaseException as error:
                died(f"{type(error).__name__}: {error}")
                raise

    def _stop_hub(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._threads[0].join(10.0)

    def _submit(self, work: Coroutine[Any, Any, R]) -> concurrent.futures.Future[R]:
        if self._closed and self._loop.is_closed():
            work.close()
            raise Unavailable("this engine is shut down")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _wait(self, work: Coroutine[Any, Any, R]) -> R:
        future = self._submit(work)
        try:
            return future.result()
        except (KeyboardInterrupt, SystemExit):
            future.cancel()
            raise

    # ---- answers (on the hub's loop)

    async def _job(self, body: dict[str, Any]) -> Job:
        return await native.parse(body, self._service)

    async def _scores(self, body: dict[str, Any]) -> Any:
        return await self._answer(await score.parse(body, self._service))

    async def _whole(self, body: dict[str, Any]) -> Any:
        return await self._answer(await self._job(body))

    async def _embedded(self, texts: str | Sequence[str] | None, fields: Mapping[str, Any]) -> Any:
        body = {**fields, "text": texts if texts is None or isinstance(texts, str) else list(texts)}
        return await self._answer(await embeddings.parse_native(body, self._service))

    async def _answer(self, job: Job) -> Any:
        with job.submit(self._hub) as stream:
            deltas = await stream.whole(patient=job.form.patient)
            return msgspec.json.decode(job.form.whole(deltas))

    async def _pieces(self, body: dict[str, Any]) -> AsyncIterator[Answer]:
        job = await self._job(body)
        with job.submit(self._hub) as stream:
            while not stream.done:
                await stream.wait()
                for index, delta in stream.take():
                    for piece in job.form.piece(index, delta):
                        yield msgspec.json.decode(piece)

    def _iterate(self, body: dict[str, Any]) -> Iterator[Answer]:
        """Answers of a stream, handed from the hub's thread to the caller's. Leaving the iterator ends the request."""
        news: queue.SimpleQueue[Answer | BaseException | None] = queue.SimpleQueue()
        future = self._submit(_pump(self._pieces(body), news.put))
        try:
            while (piece := news.get()) is not None:
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        finally:
            future.cancel()

    async def _aiterate(self, body: dict[str, Any]) -> AsyncIterator[Answer]:
        caller = asyncio.get_running_loop()
        news: asyncio.Queue[Answer | BaseException | None] = asyncio.Queue()
        put = lambda piece: caller.call_soon_threadsafe(news.put_nowait, piece)  # noqa: E731
        future = self._submit(_pump(self._pieces(body), put))
        try:
            while (piece := await news.get()) is not None:
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        finally:
            future.cancel()


async def _pump(pieces: AsyncIterator[Answer], put: Any) -> None:
    """Hand pieces over one by one, then None; an error in place of the rest."""
    try:
        async for piece in pieces:
            put(piece)
        put(None)
    except RadixError as error:
        put(error)


def _body(
    prompt: str | Sequence[str] | None,
    sampling_params: Params,
    input_ids: Sequence[int] | Sequence[Sequence[int]] | None,
    fields: Mapping[str, Any],
    stream: bool,
) -> dict[str, Any]:
    """The arguments as a `/generate` body. numpy and tuple ids are taken too."""
    body: dict[str, Any] = {**fields, "stream": stream}
    if prompt is not None:
        body["text"] = prompt if isinstance(prompt, str) else list(prompt)
    if input_ids is not None:
        body["input_ids"] = [int(i) if not isinstance(i, Sequence) else list(i) for i in input_ids]
    if sampling_params is not None:
        single = isinstance(sampling_params, Mapping)
        body["sampling_params"] = dict(sampling_params) if single else [dict(p) for p in sampling_params]  # type: ignore[arg-type]
    return body


def _silent(stage: str, fraction: float) -> None:
    pass
