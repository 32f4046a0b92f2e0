"""JSCH, RGX, GRAM: structured output over HTTP, whole and as a stream. The model is random: only the grammar helps."""

from __future__ import annotations

import json
import re
import threading
import time
from functools import partial
from typing import Any

import jsonschema
import pytest

from support.live import Server, deltas, finishes, together

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
Json = dict[str, Any]


def formatted(schema: Any) -> Json:
    return {"type": "json_schema", "json_schema": {"name": "r", "strict": True, "schema": schema}}


def answers(server: Server, schema: Any, **more: Any) -> Any:
    """The document, the same whole and as a stream."""
    asked = {"max_tokens": 80, "response_format": formatted(schema), **more}
    whole = server.chat("Hi", **asked)["choices"][0]
    chunks = server.chat_stream("Hi", **asked)
    assert "".join(deltas(chunks)) == whole["message"]["content"]
    assert finishes(chunks) == [whole["finish_reason"]] == ["stop"]
    document = json.loads(whole["message"]["content"])
    jsonschema.validate(document, schema)
    return document


def refused(server: Server, schema: Any) -> Json:
    body = {"model": server.model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 64}
    error = server.refused(CHAT, {**body, "response_format": formatted(schema)})
    assert error["param"] == "response_format"
    return error


def test_jsch_1_local_references(plain: Server) -> None:
    schema = {
        "type": "object",
        "properties": {
            "t": {"type": "integer", "minimum": 0, "maximum": 99},
            "u": {"$ref": "#/properties/t"},
            "d": {"$ref": "#/$defs/D"},
        },
        "required": ["t", "u", "d"],
        "additionalProperties": False,
        "$defs": {"D": {"enum": ["x"]}},
    }
    assert answers(plain, schema)["d"] == "x"


def test_jsch_3_array_length_bounds(plain: Server) -> None:
    assert answers(plain, {"type": "array", "items": {"enum": ["q"]}, "minItems": 2, "maxItems": 2}) == ["q", "q"]


def test_jsch_5_wide_characters_and_quotes(plain: Server) -> None:
    value = 'naïve 🙂 "x" \\ \n'
    schema = {"type": "object", "properties": {"k": {"enum": [value]}}, "required": ["k"]}
    assert answers(plain, {**schema, "additionalProperties": False}) == {"k": value}


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "minItems": 3}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "object", "properties": {"foo": "bar"}}, "schema"),
        ({"type": "objekt"}, "objekt"),
        ({"type": "object", "properties": 5}, "properties"),
        ([], "schema"),
        ("x", "schema"),
    ],
)
def test_jsch_8_9_what_is_not_enforced_is_refused(plain: Server, schema: Any, named: str) -> None:
    assert named in refused(plain, schema)["message"]


def test_jsch_8_formats_are_enforced(plain: Server) -> None:
    text = answers(plain, {"type": "string", "format": "date-time"})
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)", text, re.IGNORECASE)


def test_jsch_10_white_space_cannot_run_for_ever(plain: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    blanks = {str(plain.tokenize(prompt=blank, add_special_tokens=False)[0]): 60 for blank in (" ", "\n")}
    answers(plain, {**schema, "additionalProperties": False}, logit_bias=blanks)


def test_json_objects(plain: Server) -> None:
    """A random model has no end of a text in mind; what there is of it must be the beginning of an object."""
    text = plain.chat("Hi", max_tokens=12, response_format={"type": "json_object"})["choices"][0]["message"]["content"]
    assert text.startswith("{")


@pytest.mark.parametrize("regex", ["[a-z", "(ab", "a{2,1}", "*a", "a**", "[z-a]", "\\"])
def test_rgx_1_bad_regexes(plain: Server, regex: str) -> None:
    error = plain.refused(COMPLETIONS, {"model": plain.model, "prompt": "Say it:", "max_tokens": 64, "regex": regex})
    assert error["param"] == "regex" and error["message"]


@pytest.mark.parametrize("regex", ["^ab$", "^(?:ab)$", "ab"])
def test_rgx_2_anchors(plain: Server, regex: str) -> None:
    choice = plain.complete(prompt="Say it:", max_tokens=64, regex=regex)["choices"][0]
    assert choice["text"] == "ab" and choice["finish_reason"] == "stop"


def test_rgx_3_wide_characters_in_classes(plain: Server) -> None:
    regex = "[é]{2}[à-ÿ]{3}[一-龥]{2}"
    text = plain.text(prompt="Say it:", max_tokens=64, regex=regex)
    assert re.fullmatch(regex, text) and len(text) == 7


def test_rgx_4_huge_repetitions_and_gram_6_bad_grammars_disturb_nobody(plain: Server) -> None:
    alone = plain.text(prompt="Once upon", max_tokens=60, ignore_eos=True)
    gaps: list[float] = []
    texts: list[str] = []

    def stream() -> None:
        with plain.open(COMPLETIONS, {"model": plain.model, "prompt": "Once upon", "max_tokens": 60, "temperature": 0,
                                      "ignore_eos": True}) as events:  # fmt: skip
            last, text = time.monotonic(), ""
            for chunk in events:
                now = time.monotonic()
                gaps.append(now - last)
                last = now
                text += "".join(deltas([chunk]))
        texts.append(text)

    thread = threading.Thread(target=stream)
    thread.start()
    for regex in ("(a{1,1000}){1,1000}", "((a+)+)+b", "(a|a){0,100000}", "[a-z]{0,1000000}", "(.*a.{200}){3}"):
        started = time.monotonic()
        asked = {"model": plain.model, "prompt": "Say it:", "max_tokens": 4, "temperature": 0, "regex": regex}
        assert plain.post(COMPLETIONS, asked).status_code in (200, 400)
        assert time.monotonic() - started < 10
        assert plain.health() == 200
    for _ in range(5):
        refused(plain, {"type": "array", "items": [5]})
    thread.join()
    assert max(gaps) < 3 and texts == [alone]


@pytest.mark.parametrize(
    ("ebnf", "language"),
    [('root ::= root "a" | "b"', "ba*"), ('root ::= e\ne ::= n | e "+" e\nn ::= [0-9]+', "[0-9]+(\\+[0-9]+)*")],
)
def test_gram_1_left_recursion(plain: Server, ebnf: str, language: str) -> None:
    choice = plain.complete(prompt="Say it:", max_tokens=64, temperature=1, seed=3, ebnf=ebnf)["choices"][0]
    assert re.fullmatch(language, choice["text"]) or choice["finish_reason"] == "length"


@pytest.mark.parametrize("ebnf", ["root ::= nosuch", 'start ::= "a"', "root := :=", "   "])
def test_gram_2_broken_grammars(plain: Server, ebnf: str) -> None:
    error = plain.refused(COMPLETIONS, {"model": plain.model, "prompt": "Say it:", "max_tokens": 64, "ebnf": ebnf})
    assert error["param"] == "ebnf"


def test_gram_2_an_empty_grammar_is_none(plain: Server) -> None:
    asked = {"prompt": "Say it:", "max_tokens": 5}
    assert plain.text(**asked, ebnf="", regex="") == plain.text(**asked)


@pytest.mark.parametrize("more", [{"response_format": {"type": "json_object"}}, {"ebnf": 'root ::= "a"'}])
def test_gram_3_two_constraints(plain: Server, more: Json) -> None:
    body = {"model": plain.model, "messages": [{"role": "user", "content": "Hi"}], "regex": "ab", **more}
    assert "exclude each other" in plain.refused(CHAT, body)["message"]


def test_gram_5_the_store_is_bounded(plain: Server) -> None:
    def ask(i: int) -> None:
        body = {"response_format": formatted({"enum": [f"s{i}"]})}
        assert plain.chat("Hi", max_tokens=6, **body)["choices"][0]["message"]["content"] == f'"s{i}"'

    for i in range(30):
        ask(i)
    before = plain.memory()
    together([partial(ask, i) for i in range(30, 180)])
    assert plain.memory() - before < 100 << 20
    figures = plain.metrics()
    assert figures["grammar_compilations_total"] >= 180 and figures["jump_forward_tokens_total"] > 0


def test_native_answers_tell_of_forced_tokens(plain: Server) -> None:
    answer = plain.ask("/generate", {"text": "Hi", "sampling_params": {"regex": "one, two, three", "temperature": 0}})
    assert answer["text"] == "one, two, three"
    assert answer["meta_info"]["jump_forward_tokens"] == answer["meta_info"]["completion_tokens"]


@pytest.mark.parametrize(
    "fields",
    [{"guided_choice": ["red", "green"]}, {"structured_outputs": {"choice": ["red", "green"]}}, {"choice": ["red"]}],
)
def test_choices(plain: Server, fields: Json) -> None:
    assert plain.text(prompt="A colour:", max_tokens=9, **fields) in ("red", "green")


def test_scores_of_continuations(plain: Server) -> None:
    body = {"model": plain.model, "prompt": "The capital of France is", "continuations": [" Paris", " Rome, I think"]}
    answer = plain.ask("/v1/score", body)
    assert [entry["index"] for entry in answer["data"]] == [0, 1]
    for entry in answer["data"]:
        assert entry["logprob"] == pytest.approx(sum(entry["token_logprobs"])) and entry["logprob"] < 0
    labels = plain.tokenize(prompt=" yes", add_special_tokens=False) + plain.tokenize(
        prompt=" no", add_special_tokens=False
    )
    asked = {"query": "Is it? ", "items": ["Water is wet.", "Fire is cold."], "label_token_ids": labels}
    rows = plain.ask("/v1/score", {**asked, "apply_softmax": True})["scores"]
    assert len(rows) == 2 and all(sum(row) == pytest.approx(1) for row in rows)
    assert plain.refused("/v1/score", {"prompt": "Hi"})["param"] == "continuations"
    assert plain.refused("/v1/score", {**asked, "label_token_ids": []})["message"]
