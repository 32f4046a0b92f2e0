"""This module owns `radixlm bench offline`: throughput of an engine in this process, with and without its cache."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from radixlm.base.errors import Internal, StartupError
from radixlm.bench import datasets, report, source, trace
from radixlm.bench.datasets import Session, Spec
from radixlm.bench.options import add_engine, add_result, add_workload, resolve_engine, spec_of, writable
from radixlm.bench.source import Encode, Source
from radixlm.config.cli import Parser
from radixlm.config.resolve import override
from radixlm.config.schema import Config


class Generates(Protocol):
    """What is measured: an `Engine`."""

    def generate(self, prompt: Any, sampling_params: Any, *, input_ids: Any) -> Any: ...

    def flush_cache(self) -> Any: ...

    def stats(self) -> dict[str, Any]: ...


_WARM_UP = Spec(count=4, input_len=32, output_len=4, seed=-1)


@dataclass(frozen=True, slots=True)
class Measured:
    """One pass over a workload. Tokens are those the engine counted."""

    seconds: float
    requests: int
    input_tokens: int
    output_tokens: int
    cached_tokens: int

    @property
    def output_rate(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def input_rate(self) -> float:
        return self.input_tokens / self.seconds

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that came out of the cache."""
        return self.cached_tokens / self.input_tokens if self.input_tokens else 0.0


def parser() -> Parser:
    made = Parser(
        "radixlm bench offline",
        "Hand a whole workload to an engine in this process and measure its throughput. The same workloads as bench "
        "serve; every answer has exactly the length asked for. Each repeat has other prompts and an empty cache.",
        "radixlm bench offline [MODEL] [options]",
    )
    made.add_argument("argument", metavar="MODEL", nargs="?", help="the same as --model MODEL")
    add_workload(made)
    group = made.add_argument_group("measurement")
    group.add_argument("--repeats", type=int, default=3, metavar="N", help="passes; the median is told (3)")
    group.add_argument("--compare-radix", action="store_true", help="measure a second time without the radix cache")
    group.add_argument(
        "--trace", metavar="FILE", help="one more pass under torch's profiler: what the GPU did, as a table and a file"
    )
    add_result(made)
    add_engine(made)
    return made


def main(argv: Sequence[str]) -> int:
    said = parser().parse(argv)
    path = writable(said.save_result, "--save-result")
    traced = writable(said.trace, "--trace")
    resolved = resolve_engine(said, said.argument)
    if resolved is None:
        return 0
    if said.repeats < 1:
        raise StartupError(f"--repeats is {said.repeats}; it must be at least 1")
    config = resolved.config
    seed = config.model.random_seed or 0
    spec = spec_of(said, seed, as_text=False)
    variants = {"without radix cache" if config.cache.disable_radix_cache else "radix cache": config}
    if said.compare_radix:
        variants = {
            "radix cache": override(config, {"disable_radix_cache": False}),
            "without radix cache": override(config, {"disable_radix_cache": True}),
        }
    passes: dict[str, list[Measured]] = {}
    settings: dict[str, Any] = {"seed": seed}
    for name, variant in variants.items():
        passes[name], about = _measure(variant, spec, said.repeats, traced)
        settings |= about
    facts = settings["engine"]
    _show(f"{spec.name} on {facts['model']['name']} ({facts['model']['dtype']}, {facts['device']['name']})", passes)
    if path:
        figures = {name: [dataclasses.asdict(one) for one in runs] for name, runs in passes.items()}
        report.save(path, report.document({**settings, "passes": figures}, "offline", argv))
        print(f"result written to {path}")
    return 0


def _measure(config: Config, spec: Spec, repeats: int, traced: Path | None) -> tuple[list[Measured], dict[str, Any]]:
    """Passes over workloads of consecutive seeds, and what was measured on."""
    from radixlm.llm import Engine

    # limits that protect a server from its clients; here the whole workload is one request
    config = override(
        config,
        {
            "max_batch_items": max(spec.count, config.limits.max_batch_items),
            "max_queued_requests": max(spec.count, config.schedule.max_queued_requests),
        },
    )
    with Engine(config) as engine:
        facts = engine.facts
        origin, encode = _source(facts.model.path, facts.model.sampled_vocab_size)
        pass_over(engine, datasets.build(_WARM_UP, origin))
        passes = []
        for repeat in range(repeats):
            sessions = datasets.build(dataclasses.replace(spec, seed=spec.seed + repeat), origin, encode)
            empty_cache(engine)
            passes.append(pass_over(engine, sessions))
        if traced is not None:
            sessions = datasets.build(dataclasses.replace(spec, seed=spec.seed + repeats), origin, encode)
            empty_cache(engine)
            trace.show(trace.record(lambda: pass_over(engine, sessions), traced))
        about = {
            "engine": msgspec.to_builtins(facts),
            "dataset": {**spec.described(), "sessions": len(sessions), "source": origin.name},
        }
    return passes, about


def _source(model_path: str, vocab_size: int) -> tuple[Source, Encode | None]:
    """Real text if the model has a tokenizer beside it; else random ids."""
    file = Path(model_path) / "tokenizer.json"
    if file.is_file():
        encode = source.load_tokenizer(str(file))
        return source.tokenised(encode, "the model's tokenizer"), encode
    return source.random_ids(vocab_size), None


def empty_cache(engine: Generates) -> None:
    """Forget all prefixes. An answer may be here a moment before its sequence is gone, so that is waited for."""
    while (stats := engine.stats())["running"] or stats["waiting"]:
        time.sleep(0.001)
    engine.flush_cache()


def pass_over(engine: Generates, sessions: Sequence[Session]) -> Measured:
    """Run every session: first turns together, then second turns with the answers in their prompts, and so on."""
    history: list[list[int]] = [[] for _ in sessions]
    requests = tokens_in = tokens_out = cached = 0
    started = time.perf_counter()
    for number in range(max(len(session.turns) for session in sessions)):
        going = [i for i, session in enumerate(sessions) if number < len(session.turns)]
        turns = [sessions[i].turns[number] for i in going]
        params = [{"temperature": 0.0, "max_new_tokens": turn.max_tokens, "ignore_eos": True} for turn in turns]
        if all(turn.ids is not None for turn in turns):
            prompts = [[*history[i], *(turn.ids or ())] for i, turn in zip(going, turns, strict=True)]
            results = engine.generate(None, params, input_ids=prompts)
            for i, prompt, result in zip(going, prompts, results, strict=True):
                history[i] = [*prompt, *result["output_ids"]]
        else:
            results = engine.generate([turn.text for turn in turns], params, input_ids=None)
        for turn, result in zip(turns, results, strict=True):
            meta = result["meta_info"]
            if meta["completion_tokens"] != turn.max_tokens:
                raise Internal(f"an answer has {meta['completion_tokens']} tokens, {turn.max_tokens} were asked for")
            requests += 1
            tokens_in += meta["prompt_tokens"]
            tokens_out += meta["completion_tokens"]
            cached += meta["cached_tokens"]
    return Measured(time.perf_counter() - started, requests, tokens_in, tokens_out, cached)


def _show(title: str, passes: dict[str, list[Measured]]) -> None:
    names = list(passes)
    rows = [
        ("seconds", [f"{_median(passes[n], 'seconds'):.2f}" for n in names], "seconds"),
        ("spread of seconds", [f"{_spread(passes[n]):.1%}" for n in names], None),
        ("output tok/s", [f"{_median(passes[n], 'output_rate'):.1f}" for n in names], "output_rate"),
        ("input tok/s", [f"{_median(passes[n], 'input_rate'):.1f}" for n in names], "input_rate"),
        ("cached input", [f"{_median(passes[n], 'hit_rate'):.1%}" for n in names], None),
    ]
    first = passes[names[0]][0]
    headings = [f"{first.requests} requests", *names, *(["without / with"] if len(names) > 1 else [])]
    cells = []
    for label, values, compared in rows:
        ratio = []
        if len(names) > 1:
            ratio = [
                f"{_median(passes[names[1]], compared) / _median(passes[names[0]], compared):.2f}" if compared else ""
            ]
        cells.append((label, *values, *ratio))
    report.grid(title, headings, cells)


def _median(passes: Sequence[Measured], name: str) -> float:
    return float(statistics.median(getattr(one, name) for one in passes))


def _spread(passes: Sequence[Measured]) -> float:
    """Largest distance of a pass from the median, as a share of it."""
    middle = _median(passes, "seconds")
    return max(abs(one.seconds - middle) for one in passes) / middle
