"""What structured output costs: the mask and the acceptance of a token, a batch of constrained rows beside a free one,
and the steps that forced text saves.

    python benchmarks/grammar_overhead.py [--model smollm2] [--rows 16]

The first part runs on the host alone, over texts that a typical schema allows. In the second, constrained and free rows
generate the same number of tokens, without jump-forward, so that both compute the same steps. The third is the fixed
object of five keys, for 64 requests, with and without jump-forward.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from radixlm import Engine
from radixlm.base.request import Grammar, Request
from radixlm.base.sampling import SamplingParams
from radixlm.checkpoint.locate import locate
from radixlm.grammar.base import Vocabulary
from radixlm.grammar.guide import SequenceGuide
from radixlm.grammar.llguidance import LLGuidance
from radixlm.text.tokenizer import Tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "email": {"type": "string", "maxLength": 40},
        "active": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 5},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}, "zip": {"type": "string"}},
            "required": ["street", "city"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "email", "active", "tags", "address"],
    "additionalProperties": False,
}
DOCUMENT = {
    "name": "Ada Lovelace", "age": 36, "email": "ada@example.org", "active": True, "tags": ["maths", "engines"],
    "address": {"street": "12 St James's Square", "city": "London", "zip": "SW1Y 4JH"},
}  # fmt: skip
FIXED = {
    "type": "object",
    "properties": {
        "customer_identifier": {"type": "integer", "minimum": 0, "maximum": 99},
        "shipping_country": {"enum": ["Portugal", "Norway", "Japan"]},
        "is_returning_customer": {"type": "boolean"},
        "preferred_language": {"enum": ["pt", "no", "ja"]},
        "loyalty_points_balance": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": [
        "customer_identifier", "shipping_country", "is_returning_customer", "preferred_language",
        "loyalty_points_balance",
    ],
    "additionalProperties": False,
}  # fmt: skip


def host(model: str, repeats: int = 50) -> None:
    """Microseconds of a guide's work for a token."""
    checkpoint = locate(model, None, None, lambda stage, fraction: None)
    tokenizer = Tokenizer.of(checkpoint)
    assert checkpoint.tokenizer_file is not None
    text = checkpoint.tokenizer_file.read_text(encoding="utf-8")
    vocabulary = Vocabulary(text, tokenizer.vocab_size, tokenizer.eos_ids)
    backend = LLGuidance(vocabulary)
    grammar = Grammar(kind="json_schema", text=json.dumps(PERSON))
    started = time.perf_counter()
    compiled = backend.compile(grammar)
    print(f"compile: {1e3 * (time.perf_counter() - started):.2f} ms")
    ids = tokenizer.encode(json.dumps(DOCUMENT), add_special_tokens=False)
    request = Request(uid=0, rid="", tokens=(1,), sampling=SamplingParams(), grammar=grammar)
    # The thread's own time: others on the same cores do not count.
    masks = np.zeros((repeats, len(ids)))
    takes = np.zeros((repeats, len(ids)))
    for turn in range(repeats):
        guide = SequenceGuide(request, vocabulary, compiled.matcher)
        for i, token in enumerate(ids):
            began = time.thread_time_ns()
            guide.mask()
            between = time.thread_time_ns()
            guide.take(token)
            takes[turn, i] = (time.thread_time_ns() - between) / 1e3
            masks[turn, i] = (between - began) / 1e3
    for name, us in (("mask", masks), ("accept and look ahead", takes), ("both", masks + takes)):
        print(
            f"{name}: mean {us.mean():.1f} us, median {np.median(us):.1f}, "
            f"99th percentile {np.percentile(us, 99):.1f}; the first time {us[0].mean():.1f}"
        )


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    answer = work()
    return time.perf_counter() - started, answer


def batch(model: str, rows: int, tokens: int, repeats: int = 3) -> None:
    """Tokens per second of constrained and of free rows, each the best of some runs."""
    with Engine(model=model, disable_jump_forward=True) as engine:
        prompts = [f"Row {i}: " for i in range(rows)]
        common = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        long = {"type": "array", "items": PERSON, "minItems": 50}
        ways: dict[str, dict[str, Any]] = {"free": common, "constrained": {**common, "json_schema": long}}
        best: dict[str, float] = {}
        for _ in range(repeats):
            for name, params in ways.items():
                seconds, answers = timed(lambda params=params: engine.generate(prompts, params))
                count = sum(answer["meta_info"]["completion_tokens"] for answer in answers)
                best[name] = max(best.get(name, 0.0), count / seconds)
        ratio = best["constrained"] / best["free"]
        print(
            f"{rows} rows: free {best['free']:.1f} tokens/s, constrained {best['constrained']:.1f} ({ratio:.1%} of it)"
        )


def jumps(model: str, requests: int = 64) -> None:
    """Steps and seconds with forced text appended, and sampled."""
    prompts = [f"Customer number {i}: " for i in range(requests)]
    params = {"json_schema": FIXED, "temperature": 0, "max_new_tokens": 128}
    found: dict[str, tuple[int, float, list[list[int]]]] = {}
    for name, off in (("on", False), ("off", True)):
        with Engine(model=model, disable_jump_forward=off) as engine:
            engine.generate(prompts[:1], params)
            engine.flush_cache()
            before = engine.stats()["steps"]
            seconds, answers = timed(lambda engine=engine: engine.generate(prompts, params))
            steps = int(engine.stats()["steps"] - before)
            found[name] = steps, seconds, [answer["output_ids"] for answer in answers]
            print(f"jump-forward {name}: {steps} steps, {seconds:.2f} s")
    (on, fast, a), (off_, slow, b) = found["on"], found["off"]
    print(f"steps saved: {1 - on / off_:.1%}, time: {1 - fast / slow:.1%}, equal texts: {a == b}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=64)
    options = parser.parse_args()
    host(options.model)
    batch(options.model, options.rows, options.tokens)
    jumps(options.model, options.requests)


if __name__ == "__main__":
    main()
