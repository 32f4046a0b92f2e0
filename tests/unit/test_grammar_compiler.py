"""Compiling: in other threads, once for each grammar, within limits, whatever is thrown at it."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable

import numpy as np
import psutil
import pytest

from radixlm.base.errors import BadRequest, RadixError
from radixlm.base.request import Grammar, Request
from radixlm.base.sampling import SamplingParams
from radixlm.grammar import compiler as module
from radixlm.grammar.base import GrammarError, Vocabulary
from radixlm.grammar.compiler import Compiler, Limits
from radixlm.grammar.guide import SequenceGuide
from support.grammars import vocabulary


def request(kind: str, text: str, uid: int = 1) -> Request:
    grammar = Grammar(kind=kind, text=text)
    return Request(uid=uid, rid="r", tokens=(5,), sampling=SamplingParams(), grammar=grammar)


def make(backend: str = "auto", read: Callable[[], Vocabulary] = vocabulary, **limits: float) -> Compiler:
    known = {"seconds": 10.0, "bytes": 1 << 20, **limits}
    made = Compiler(read, backend, Limits(seconds=known["seconds"], bytes=int(known["bytes"])))
    made.warm()
    return made


def wait(compiler: Compiler, kind: str, text: str) -> SequenceGuide:
    ticket = compiler.ticket(request(kind, text))
    assert ticket is not None
    until = time.monotonic() + 60
    while (guide := ticket.guide()) is None:
        assert time.monotonic() < until
        time.sleep(0.001)
    return guide


def test_a_request_without_a_grammar_gets_no_ticket() -> None:
    plain = Request(uid=1, rid="r", tokens=(5,), sampling=SamplingParams())
    assert make().ticket(plain) is None


def test_a_grammar_is_compiled_once() -> None:
    compiler = make()
    guides = [wait(compiler, "regex", "[ab]+") for _ in range(3)]
    assert compiler.figures()["grammars_compiled"] == 1 and compiler.figures()["grammars_cached"] == 2
    token = next(iter(np.flatnonzero(np.unpackbits(guides[0].mask().view(np.uint8), bitorder="little")).tolist()))  # type: ignore[union-attr]
    guides[0].take(token)  # guides are independent of each other
    assert guides[1].mask() is not None


def test_refusals_are_raised_when_the_guide_is_asked_for() -> None:
    compiler = make(bytes=1000)
    for kind, text, named in (
        ("regex", "[a", "malformed"),
        ("regex", "a" * 1001, "--max-grammar-bytes"),
        ("nonsense", "a", "unknown kind"),
        ("json_schema", "{", "JSON"),
    ):
        with pytest.raises(BadRequest, match=named):
            wait(compiler, kind, text)
    with pytest.raises(GrammarError, match="--grammar-backend none"):
        wait(make("none"), "regex", "a")


def test_a_vocabulary_that_cannot_be_read_is_a_reason() -> None:
    def fail() -> Vocabulary:
        raise GrammarError("this model has no tokenizer")

    with pytest.raises(GrammarError, match="no tokenizer"):
        wait(make(read=fail), "regex", "a")


def test_a_compilation_that_takes_too_long_is_given_up() -> None:
    compiler = make(seconds=0.001)
    many = json.dumps({"enum": [f"value number {i}" for i in range(20_000)]})
    with pytest.raises(GrammarError, match="--grammar-timeout"):
        wait(compiler, "json_schema", many)


def test_the_store_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CACHE_BYTES", 1 << 20)
    compiler = make()
    for i in range(40):
        wait(compiler, "json_schema", json.dumps({"enum": [f"s{i}"]}))
    assert 1 <= len(compiler._kept) <= 12
    assert compiler._kept_bytes == sum(job.compiled.size for job in compiler._kept.values() if job.compiled)


def test_memory_stays_within_bounds_over_many_grammars() -> None:
    compiler, process = make(), psutil.Process()
    before = 0
    for i in range(600):
        wait(compiler, "json_schema", json.dumps({"enum": [f"s{i}"]})).mask()
        if i == 100:
            gc.collect()
            before = process.memory_info().rss
    gc.collect()
    assert process.memory_info().rss - before < 200 << 20


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


HOSTILE = {
    "parentheses": ("ebnf", "root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000),
    "a deep schema": ("json_schema", nested(3000)),
    "a large enum": ("json_schema", json.dumps({"enum": [f"s{i}" for i in range(50_000)]})),
    "alternatives": ("regex", "(a|b|ab){1,3000}c"),
    "nested counts": ("regex", "(a{1,1000}){1,1000}"),
    "nested pluses": ("regex", "((a+)+)+b"),
    "a long string": ("json_schema", '{"type":"string","maxLength":10000000}'),
    "many optional keys": (
        "json_schema",
        json.dumps({"type": "object", "properties": {f"k{i}": {"type": "integer"} for i in range(200)}}),
    ),
    "a long list": ("json_schema", '{"type":"array","items":{"type":"integer"},"maxItems":1000000}'),
    "recursion": ("json_schema", '{"$ref":"#"}'),
    "states": ("regex", "(.*a.{200}){3}"),
    "left recursion": ("ebnf", 'root ::= root "a" | "b"'),
    "deep groups": ("regex", "(" * 5000 + "a" + ")" * 5000),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_answered_in_bounded_time_and_memory(name: str) -> None:
    kind, text = HOSTILE[name]
    compiler, process, rng = make(), psutil.Process(), np.random.default_rng(0)
    before, started = process.memory_info().rss, time.monotonic()
    longest = 0.0
    refusal: RadixError | None = None
    try:
        guide = wait(compiler, kind, text)
        for _ in range(60):
            if guide.done:
                break
            began = time.monotonic()
            mask = guide.mask()
            longest = max(longest, time.monotonic() - began)
            assert mask is not None
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            guide.take(int(rng.choice(allowed)))
    except RadixError as error:
        refusal = error
    assert refusal is None or (refusal.status == 400 and refusal.message)
    assert time.monotonic() - started < 10
    assert longest < 2
    assert process.memory_info().rss - before < 500 << 20


class Panic(BaseException):
    """What a panic of a library in Rust looks like from here."""


def test_a_panic_of_the_library_ends_the_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def compile(self, grammar: Grammar) -> None:
            raise Panic

    compiler = make()
    monkeypatch.setattr(module.select, "load", lambda name, vocabulary: Broken())
    for text in ("a", "b", "c"):  # more than there are threads
        with pytest.raises(GrammarError, match="could not be compiled: Panic"):
            wait(compiler, "regex", text)
