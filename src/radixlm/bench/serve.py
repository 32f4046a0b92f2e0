"""This module owns `radixlm bench serve`: a load on any OpenAI-compatible server."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from radixlm.base.errors import BadRequest, RadixError, Unavailable
from radixlm.bench import datasets, plot, report, source
from radixlm.bench.datasets import Session, Spec
from radixlm.bench.loadgen import Load, Record, Run, run
from radixlm.bench.options import add_result, add_workload, spec_of, writable
from radixlm.bench.source import Encode, Source
from radixlm.bench.summary import parse_slo, summarise
from radixlm.bench.target import CHAT, COMPLETIONS, HttpTarget
from radixlm.client.http import Client
from radixlm.config import env
from radixlm.config.cli import Parser

_ENDPOINTS = {"completions": COMPLETIONS, "chat": CHAT, COMPLETIONS: COMPLETIONS, CHAT: CHAT}
_WARM_UP = Spec(input_len=32, output_len=8, seed=-1)


def parser() -> Parser:
    made = Parser(
        "radixlm bench serve",
        "Put a load on an OpenAI-compatible server and measure latencies and throughput. Arrivals are open-loop: "
        "latencies count from when a request was due, so a stalled server cannot hide behind unsent requests.",
        "radixlm bench serve [--url URL] [options]",
    )
    group = made.add_argument_group("server")
    group.add_argument(
        "--url", "--base-url", default="http://127.0.0.1:30000", help="the server (http://127.0.0.1:30000)"
    )
    group.add_argument("--model", "-m", metavar="NAME", help="model name to send (the first one served)")
    group.add_argument("--endpoint", choices=tuple(_ENDPOINTS), default="completions", help="which route (completions)")
    group.add_argument("--api-key", metavar="TEXT", help="bearer token (RADIXLM_API_KEY)")
    group.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="tokenizer.json, or its directory, to cut prompts with (the server's /tokenize)",
    )
    group.add_argument("--vocab-size", type=int, metavar="N", help="without a tokenizer: random token ids below this")
    group.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="silence after which a request fails (600)"
    )
    add_workload(made)
    group = made.add_argument_group("load")
    group.add_argument(
        "--request-rate", type=float, default=math.inf, metavar="X", help="arrivals a second (inf: all at once)"
    )
    group.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="X",
        help="1: Poisson arrivals; less: burstier; inf: fixed rate (1)",
    )
    group.add_argument("--max-concurrency", type=int, metavar="N", help="requests in flight at most (no bound)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts, lengths and arrivals (0)")
    group.add_argument(
        "--warmup-requests", "--num-warmups", type=int, default=1, metavar="N", help="unmeasured before (1)"
    )
    group.add_argument("--flush-cache", action="store_true", help="empty the server's prefix cache first")
    group = made.add_argument_group("answers")
    group.add_argument("--ignore-eos", action="store_true", help="generate all tokens asked for (an extension)")
    group.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy (0)")
    group.add_argument("--extra-request-body", "--extra-body", metavar="JSON", help="further fields of every request")
    group = made.add_argument_group("result")
    group.add_argument(
        "--slo",
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="count requests that meet ttft:, tpot:, e2e:",
    )
    group.add_argument("--plot", metavar="FILE", help="draw latency CDFs and the course of the load (png, svg, pdf)")
    add_result(made)
    group.add_argument("--save-detailed", action="store_true", help="with the time of every token in --save-result")
    return made


def main(argv: Sequence[str]) -> int:
    said = parser().parse(argv)
    result_path = writable(said.save_result, "--save-result")
    plot_path = Path(said.plot) if said.plot else None
    if plot_path:
        plot.require(plot_path)
    spec = spec_of(said, said.seed, as_text=False)
    slo = parse_slo(said.slo)
    load = Load(
        rate=said.request_rate, burstiness=said.burstiness, max_concurrency=said.max_concurrency, seed=said.seed
    )
    _raise_file_limit()
    measured, settings = asyncio.run(_measure(said, spec, load))
    summary = summarise(measured, slo, load.max_concurrency)
    title = f"{settings['dataset']['name']} on {settings['model']} at {settings['url']}"
    report.show(title, summary, report.errors_of(measured))
    if plot_path:
        plot.plot(measured, title, plot_path)
        print(f"plot written to {plot_path}")
    if result_path:
        figures = report.load_document(measured, summary, detailed=said.save_detailed)
        content = report.document({**settings, "slo_ms": slo, **figures}, "serve", argv)
        report.save(result_path, content)
        print(f"result written to {result_path}")
    return 0 if summary.completed else 1


async def _measure(said: argparse.Namespace, spec: Spec, load: Load) -> tuple[Run, dict[str, Any]]:
    key = said.api_key or env.twins().get("api_key")
    async with Client(said.url, key, timeout=said.timeout) as client:
        model = said.model or await client.model()
        origin, encode = await _source(client, model, said)
        route = _ENDPOINTS[said.endpoint]
        as_text = route == CHAT or spec.name == "multi-turn" or not origin.has_ids
        spec = dataclasses.replace(spec, as_text=as_text)
        sessions = datasets.build(spec, origin, encode)
        target = HttpTarget(client, model, route, _fields(said))
        if said.flush_cache:
            await client.post("/flush_cache")
        await _warm_up(target, origin, spec, said.warmup_requests)
        with _progress(sessions) as on_done:
            measured = await run(target, sessions, load, on_done)
        settings = {
            "url": client.url,
            "model": model,
            "endpoint": route,
            "seed": said.seed,
            "dataset": {**spec.described(), "sessions": len(sessions), "source": origin.name},
            "load": {
                "request_rate": load.rate if math.isfinite(load.rate) else "inf",
                "burstiness": load.burstiness if math.isfinite(load.burstiness) else "inf",
                "max_concurrency": load.max_concurrency,
            },
            "server": await _server_info(client),
        }
    return measured, settings


async def _warm_up(target: HttpTarget, origin: Source, spec: Spec, count: int) -> None:
    """Requests that nobody measures. A server that cannot answer is found out here, with its reason."""
    if count < 1:
        return
    sessions = datasets.build(dataclasses.replace(_WARM_UP, count=count, as_text=spec.as_text), origin)
    warm = await run(target, sessions, Load())
    for record in warm.records:
        if record.error is not None:
            raise Unavailable(f"the warm-up request failed: {record.error}")


async def _source(client: Client, model: str, said: argparse.Namespace) -> tuple[Source, Encode | None]:
    """What prompts are cut from: the given tokenizer's, the server's, random ids, or text that nobody counted."""
    if said.tokenizer:
        encode = source.load_tokenizer(said.tokenizer)
        return source.tokenised(encode, Path(said.tokenizer).name), encode
    if said.vocab_size:
        return source.random_ids(said.vocab_size), None
    text, _ = source.topics_text()
    try:
        encoded = {piece: await _tokenize(client, model, piece) for piece in source.pieces(text)}
    except RadixError:
        print("the server has no /tokenize: prompts are text and their lengths approximate", file=sys.stderr)
        return source.plain_text(), None
    return source.tokenised(encoded.__getitem__, f"{client.url}/tokenize"), None


async def _tokenize(client: Client, model: str, text: str) -> list[int]:
    answer = await client.post("/tokenize", {"model": model, "prompt": text, "add_special_tokens": False})
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
        raise Unavailable("/tokenize does not answer with token ids")
    return tokens


def _fields(said: argparse.Namespace) -> dict[str, Any]:
    fields: dict[str, Any] = {"temperature": said.temperature}
    if said.ignore_eos:
        fields["ignore_eos"] = True
    if said.extra_request_body:
        try:
            extra = msgspec.json.decode(said.extra_request_body, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise BadRequest(
                f"--extra-request-body is not a JSON object: {error}", param="extra_request_body"
            ) from None
        fields |= extra
    return fields


async def _server_info(client: Client) -> Any:
    """What the server says about itself, if it does."""
    try:
        return await client.get("/server_info")
    except RadixError:
        return None


@contextlib.contextmanager
def _progress(sessions: Sequence[Session]) -> Iterator[Callable[[Record], None]]:
    """A bar on standard error where a person is watching."""
    if not sys.stderr.isatty():
        yield lambda record: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("requests", total=sum(len(session.turns) for session in sessions))
        yield lambda record: bar.advance(task)


def _raise_file_limit() -> None:
    """Each request in flight holds a socket; the soft limit of files is often 1024."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
