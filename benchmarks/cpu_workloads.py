#!/usr/bin/env python3
"""Serving workloads C1..C6 for CPUs: engines side by side in one run, repeat by repeat, since a shared machine drifts.

    python benchmarks/cpu_workloads.py --engines radixlm,hf --model smollm2 --workloads all --out results.jsonl
    python benchmarks/cpu_workloads.py --engines http --command "radixlm serve {model} --port {port}"

Greedy, stop tokens ignored, prompts are real English text given as token ids, so that every engine gets the same ids:

    C1  one stream, 128 in / 128 out: decode tokens a second after the first token
    C2  16 requests at once, 256 in / 64 out: output tokens a second over the wall time
    C3  32 requests that share a 1024-token prefix (+ 64 own tokens) and 32 of 1088 own tokens, all 64 at once, 32 out:
        wall time; C3shared and C3unique are its halves alone
    C4  one prompt of 2048 tokens, 1 out: prompt tokens a second
    C5  process start to the end of the first answer (8 in / 1 out)
    C6  peak resident memory of the engine's processes over the workloads above

The text of every repeat starts at another place, so that no repeat finds the prompts of an earlier one in a prefix
cache. Prompts depend only on (text, tokenizer, seed, workload, repeat). Each engine has a process of its own. Each
workload prints a JSON line for each engine; a table follows at the end, with the figures that other engines reached.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines import ENGINES, Answer, Request, Worker, work
from machine import Noise, PeakMemory, conditions, wait_quiet

ORDER = ("C5", "C1", "C4", "C2", "C3", "C3shared", "C3unique", "C6")
HEAVY = ("C3", "C3shared", "C3unique")
UNITS = {"C1": "decode tok/s", "C2": "output tok/s", "C4": "prompt tok/s", "C6": "MiB"}  # the others: seconds
FASTER_IS_MORE = ("C1", "C2", "C4")

Found = dict[str, Any]


@dataclass(frozen=True)
class Peer:
    """What the best other engine reached, and what transformers `generate` (bf16) did on the same machine."""

    value: float
    engine: str
    transformers: float | None = None


#: SmolLM2-135M-Instruct, 2 threads. Where the best used quantised weights, the best with bf16 weights is told too.
PEER_MACHINE = "2 virtual cores of an Intel Xeon (Emerald Rapids: AVX-512, AMX), 24 GiB"
PEERS = {
    "C1": (Peer(78.1, "llama-server Q4_1", 16.2), Peer(40.8, "llama-cpp-python bf16", 16.2)),
    "C2": (Peer(175, "vLLM bf16, compiled", 98.6),),
    "C3": (Peer(28.2, "vLLM bf16, compiled", 90.9),),
    "C3shared": (Peer(5.3, "vLLM bf16, compiled", 44.5),),
    "C3unique": (Peer(25.9, "vLLM bf16, compiled", 47.9),),
    "C4": (Peer(1551, "vLLM bf16, compiled", 1076),),
    "C5": (Peer(0.63, "llama-cpp-python bf16", 5.6),),
    "C6": (Peer(529, "llama-cpp-python bf16", 2880),),
}


class Corpus:
    """Token ids of real text. Slices start where a seeded generator says."""

    def __init__(self, tokenizer: Path, text_file: Path | None) -> None:
        from tokenizers import Tokenizer

        if text_file is not None:
            text = text_file.read_text(encoding="utf-8", errors="replace")
            name = text_file.name
        else:
            from pydoc_data.topics import topics  # ships with CPython: 0.7 MB of English prose with some code

            text = "\n\n".join(topics[key] for key in sorted(topics))
            name = f"pydoc_data.topics of CPython {platform.python_version()}"
        encoder = Tokenizer.from_file(str(tokenizer))
        self.ids: list[int] = []
        for at in range(0, len(text), 20000):
            self.ids += encoder.encode(text[at : at + 20000], add_special_tokens=False).ids
        self.name = f"{name} {hashlib.sha256(json.dumps(self.ids).encode()).hexdigest()[:12]}"

    def slice(self, rng: random.Random, count: int) -> list[int]:
        at = rng.randrange(0, len(self.ids) - count)
        return self.ids[at : at + count]


def requests_of(workload: str, corpus: Corpus, seed: int, repeat: int | str) -> list[Request]:
    """The requests of one repeat of a workload, all submitted at once."""
    rng = random.Random(f"{seed}/{workload}/{repeat}")
    if workload == "C1":
        return [Request(corpus.slice(rng, 128), 128)]
    if workload == "C2":
        return [Request(corpus.slice(rng, 256), 64) for _ in range(16)]
    if workload == "C4":
        return [Request(corpus.slice(rng, 2048), 1)]
    if workload in HEAVY:
        prefix = corpus.slice(rng, 1024)
        shared = [Request(prefix + corpus.slice(rng, 64), 32) for _ in range(32)]
        unique = [Request(corpus.slice(rng, 1088), 32) for _ in range(32)]
        mixed = [request for pair in zip(shared, unique, strict=True) for request in pair]
        return {"C3": mixed, "C3shared": shared, "C3unique": unique}[workload]
    raise ValueError(f"{workload} has no requests of its own")


def figure(workload: str, requests: list[Request], answers: list[Answer], seconds: float) -> Found:
    """What one repeat gave: `value` in the workload's unit, and what else is known."""
    short = [(asked.count, got.count) for asked, got in zip(requests, answers, strict=True) if asked.count != got.count]
    if short:
        raise RuntimeError(f"answers of other lengths than asked for (asked, got): {short[:4]}")
    tokens_in, tokens_out = sum(len(request.ids) for request in requests), sum(answer.count for answer in answers)
    firsts = [answer.first for answer in answers if answer.first is not None]
    found: Found = {"seconds": seconds, "head": answers[0].head}
    if firsts:
        found["first_median"], found["first_max"] = statistics.median(firsts), max(firsts)
    if workload == "C1":
        only = answers[0]
        found["value"] = (only.count - 1) / (only.last - only.first) if only.first is not None else tokens_out / seconds
    elif workload == "C2":
        found["value"] = tokens_out / seconds
    elif workload == "C4":
        found["value"] = tokens_in / (firsts[0] if firsts else seconds)
    else:
        found["value"] = seconds
    return found


def measure(
    workload: str, workers: list[Worker], corpus: Corpus, options: argparse.Namespace
) -> dict[str, list[Found]]:
    """Repeats of a workload, by engine: the first repeat of each engine, then the second of each, and so on.

    A repeat during which other processes took more than `--max-other` cores is tried again, `--retries` times in all;
    the least disturbed of the noisy ones fill up what is missing.
    """
    heavy = workload in HEAVY
    wanted = options.repeats_c3 if heavy else options.repeats
    for number in range(0 if heavy else options.warm_up):
        for worker in workers:
            worker.run(requests_of(workload, corpus, options.seed, f"warm{number}"))
    quiet: dict[str, list[Found]] = {worker.name: [] for worker in workers}
    noisy: dict[str, list[Found]] = {worker.name: [] for worker in workers}
    for repeat in range(wanted + options.retries):
        lacking = [worker for worker in workers if len(quiet[worker.name]) < wanted]
        for worker in lacking:
            requests = requests_of(workload, corpus, options.seed, repeat)
            wait_quiet(options.max_other, options.quiet_wait)
            with Noise() as noise:
                seconds, answers = worker.run(requests)
            found = figure(workload, requests, answers, seconds)
            found |= {"repeat": repeat, "other": noise.other, "used": noise.used, "stolen": noise.stolen}
            (quiet if noise.other <= options.max_other else noisy)[worker.name].append(found)
    for name, kept in quiet.items():
        kept += sorted(noisy[name], key=lambda one: float(one["other"]))[: wanted - len(kept)]
    return quiet


# ---- telling


def line_of(workload: str, worker: Worker, repeats: list[Found], about: Found) -> Found:
    """The JSON line of an engine's repeats."""
    line = {
        **about,
        "engine": worker.name,
        "info": worker.info,
        "workload": workload,
        "unit": UNITS.get(workload, "s"),
        "value": statistics.median(one["value"] for one in repeats),
        "values": [round(one["value"], 4) for one in repeats],
    }
    for name in ("seconds", "first_median", "first_max"):
        if all(name in one for one in repeats):
            line[name] = round(statistics.median(one[name] for one in repeats), 4)
    for name in ("other", "used", "stolen"):
        if all(name in one for one in repeats):
            line[f"{name}_cores"] = [round(one[name], 2) for one in repeats]
    line["head"] = repeats[0].get("head")
    return line


def table(lines: list[Found]) -> Iterable[str]:
    """Every figure beside the peers', and as a ratio to transformers where both ran."""
    here = lines[0] if lines else conditions()
    yield f"this machine: {here['cores']} cores of {here['cpu']}{', AMX' if here['amx'] else ', no AMX'}"
    yield f"best peers:   {PEER_MACHINE}; their ratio is to transformers there, ours to transformers (hf) in this run"
    yield f"{'':9} {'engine':9} {'value':>10} {'unit':13} {'x hf':>6}   best peers (x hf)"
    values = {(line["workload"], line["engine"]): line["value"] for line in lines}
    for line in lines:
        workload, engine, value = line["workload"], line["engine"], line["value"]
        base = values.get((workload, "hf"))
        ours = f"{speedup(workload, value, base):6.2f}" if base and engine != "hf" else f"{'':6}"
        peers = "; ".join(
            f"{peer.value:g} {peer.engine} ({speedup(workload, peer.value, peer.transformers):.2f})"
            for peer in PEERS.get(workload, ())
            if peer.transformers
        )
        yield f"{workload:9} {engine:9} {value:10.2f} {line['unit']:13} {ours}   {peers}"


def speedup(workload: str, value: float, base: float) -> float:
    """How many times better than `base`: above 1 is faster, or smaller."""
    return value / base if workload in FASTER_IS_MORE else base / value


# ---- running


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="radixlm", help=f"comma-separated, of {', '.join(ENGINES)}")
    parser.add_argument("--model", default="smollm2", help="short name, GGUF file or Hugging Face directory")
    parser.add_argument("--workloads", default="all", help=f"comma-separated, of {', '.join(ORDER)}")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--repeats-c3", type=int, default=2, help="repeats of C3, which takes long")
    parser.add_argument("--warm-up", type=int, default=1, help="unmeasured repeats (none for C3)")
    parser.add_argument("--max-other", type=float, default=0.15, help="cores that others may use during a repeat")
    parser.add_argument("--retries", type=int, default=3, help="further repeats in place of noisy ones")
    parser.add_argument("--quiet-wait", type=float, default=30, help="seconds to wait for quiet before a repeat")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--text", type=Path, help="file to cut prompts from (what ships with CPython)")
    parser.add_argument("--out", type=Path, help="file that JSON lines are appended to")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="radixlm: an Engine option")
    parser.add_argument("--batch", type=int, default=32, help="hf: largest static batch")
    parser.add_argument("--command", help="http: command of a server, with {port} {model} {threads}")
    parser.add_argument("--url", help="http: a server that is up")
    parser.add_argument("--served-name", help="http: the model's name there")
    parser.add_argument("--start-timeout", type=float, default=600)
    parser.add_argument("--worker", choices=ENGINES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.options = {name: _value(text) for name, _, text in (word.partition("=") for word in options.option)}
    unknown = set(options.engines.split(",")) - set(ENGINES)
    if unknown:
        parser.error(f"unknown engines {', '.join(sorted(unknown))}")
    options.names = ORDER if options.workloads == "all" else tuple(options.workloads.split(","))
    if set(options.names) - set(ORDER):
        parser.error(f"unknown workloads in {options.workloads}")
    if "http" in options.engines.split(",") and not (options.command or options.url):
        parser.error("--engines http needs --command or --url")
    return options


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def main() -> int:
    options = parse()
    if options.worker:
        work(options.worker, options)
        return 0
    directory, tokenizer = located(options.model)
    about = {
        "model": options.model, "dtype": options.dtype, "threads": options.threads, "seed": options.seed,
        "command": " ".join(sys.argv[1:]), **conditions(),
    }  # fmt: skip
    lines: list[Found] = []

    def emit(line: Found) -> None:
        text = json.dumps(line)
        print(text, flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(text + "\n")
        if "value" in line:
            lines.append(line)

    workers: list[Worker] = []
    peaks: list[PeakMemory] = []
    try:
        for name in options.engines.split(","):
            wait_quiet(options.max_other, options.quiet_wait)
            argv = [sys.executable, __file__, *sys.argv[1:], "--model", str(directory), "--worker", name]
            workers.append(worker := Worker(name, argv))
            started = first_answer(worker)
            peaks.append(PeakMemory(worker.root))
            peaks[-1].start()
            if "C5" in options.names:
                emit(line_of("C5", worker, [started], about))
        corpus = Corpus(tokenizer, options.text)
        about["corpus"] = corpus.name
        for workload in options.names:
            if workload in ("C5", "C6"):
                continue
            try:
                found = measure(workload, workers, corpus, options)
            except RuntimeError as error:
                emit({**about, "workload": workload, "error": str(error)})
                continue
            for worker in workers:
                emit(line_of(workload, worker, found[worker.name], about))
        for worker, peak in zip(workers, peaks, strict=True):
            peak.stop()
            if "C6" in options.names:
                emit(line_of("C6", worker, [{"value": round(peak.peak / 2**20)}], about))
    except RuntimeError as error:
        print(f"cpu_workloads: {error}", file=sys.stderr)
        return 1
    finally:
        for worker in workers:
            worker.close()
    print("\n".join(table(lines)))
    return 0


def first_answer(worker: Worker) -> Found:
    """C5: the engine's process was just started; ask its first question."""
    _, (answer,) = worker.run([Request([19556, 28, 905, 2905, 338, 3132, 282, 4649], 1)])
    seconds = time.time() - worker.started
    return {"value": round(seconds, 3), "ready": round(worker.ready - worker.started, 3), "head": answer.head}


def located(model: str) -> tuple[Path, Path]:
    """(Hugging Face directory, tokenizer.json) of a model; a GGUF file is converted once."""
    from radixlm.checkpoint.locate import locate

    found = locate(model, None, None, lambda stage, done: None)
    if found.tokenizer_file is None:
        raise SystemExit(f"{model} has no tokenizer.json to cut prompts with")
    return found.directory, found.tokenizer_file


if __name__ == "__main__":
    sys.exit(main())
