"""Structured output through the whole engine, over a random model: no help from a model that knows JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from radixlm import Engine
from radixlm.base.errors import BadRequest
from radixlm.base.request import Grammar, Thinking
from radixlm.base.sampling import SamplingParams
from support import tiny
from support.direct import run_requests
from support.grammars import tokenizer

pytestmark = pytest.mark.timeout(600)

#: Keys of several tokens, values of few: most of it is forced.
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
DIGITS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3}
SHORT = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "n": DIGITS},
    "required": ["name", "n"],
    "additionalProperties": False,
}
PROMPTS = [f"Customer number {i}: " for i in range(64)]
OPTIONS: dict[str, Any] = {"dtype": "float32", "threads": 1, "max_total_tokens": 20_000}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.random_model(tmp_path_factory.mktemp("grammar") / "random"))


@pytest.fixture(scope="module")
def engine(model: str) -> Iterator[Engine]:
    with Engine(model=model, **OPTIONS) as engine:
        yield engine
        engine.audit()


def ask(engine: Engine, schema: Any, prompts: list[str], **more: Any) -> list[Any]:
    params = {"json_schema": schema, "max_new_tokens": 96, "temperature": 0, **more}
    answers = engine.generate(prompts, params)
    for answer in answers:
        assert answer["meta_info"]["finish_reason"]["type"] == "stop", answer
        jsonschema.validate(json.loads(answer["text"]), schema)
    return answers


def steps(engine: Engine) -> int:
    return int(engine.stats()["steps"])


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_jump_forward_saves_steps_and_changes_nothing(model: str, temperature: float) -> None:
    found: dict[bool, tuple[list[list[int]], int, list[int]]] = {}
    for off in (False, True):
        with Engine(model=model, disable_jump_forward=off, **OPTIONS) as engine:
            before = steps(engine)
            answers = ask(engine, FIXED, PROMPTS, temperature=temperature, seed=1)
            jumped = [answer["meta_info"]["jump_forward_tokens"] for answer in answers]
            assert engine.stats()["jump_forward_tokens"] == sum(jumped)
            found[off] = [answer["output_ids"] for answer in answers], steps(engine) - before, jumped
            engine.audit()
    on, off_ = found[False], found[True]
    assert on[0] == off_[0]
    assert not any(off_[2]) and min(on[2]) > 10
    assert on[1] <= 0.7 * off_[1], (on[1], off_[1])


@pytest.mark.parametrize(
    "options",
    [
        {"disable_radix_cache": True},
        {"chunked_prefill_size": 3},
        {"page_size": 4},
        # Somebody has to pause.
        {"max_total_tokens": 130, "max_running_requests": 12, "schedule_conservativeness": 0.1},
    ],
)
def test_a_text_does_not_depend_on_how_it_was_computed(model: str, engine: Engine, options: dict[str, Any]) -> None:
    reference = [answer["output_ids"] for answer in ask(engine, FIXED, PROMPTS[:12], temperature=1.0, seed=5)]
    with Engine(model=model, **{**OPTIONS, **options}) as other:
        answers = ask(other, FIXED, PROMPTS[:12], temperature=1.0, seed=5)
        assert [answer["output_ids"] for answer in answers] == reference
        if "max_total_tokens" in options:
            assert other.stats()["retractions"] > 0
        other.audit()


@pytest.mark.parametrize("off", [False, True])
def test_the_depth_changes_nothing(model: str, off: bool) -> None:
    prompts = [[100 + i, 200 + i, 300] for i in range(6)]
    sampling = SamplingParams(max_new_tokens=90, temperature=1.0, seed=4)
    options = {"model": model, "disable_jump_forward": off, **OPTIONS}
    grammar = Grammar(kind="json_schema", text=json.dumps(FIXED))
    one, two, three = (
        run_requests(options, prompts, 0, depth, sampling=sampling, grammar=grammar) for depth in (1, 2, 3)
    )
    assert one == two == three and all(one)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("off", [False, True])
def test_thinking_is_bounded_to_the_token(model: str, depth: int, off: bool) -> None:
    prompts = [[100 + i, 200 + i, 300] for i in range(3)]
    sampling = SamplingParams(max_new_tokens=40, temperature=1.0, seed=4)
    options = {"model": model, "disable_jump_forward": off, **OPTIONS}
    end = (4001, 4002, 4003)
    thinking = Thinking(budget=10, end=end)
    free = run_requests(options, prompts, 0, depth, sampling=sampling)
    for answer, unbound in zip(
        run_requests(options, prompts, 0, depth, sampling=sampling, thinking=thinking), free, strict=True
    ):
        assert answer[:10] == unbound[:10] and tuple(answer[10:13]) == end and len(answer) == 40
    grammar = Grammar(kind="regex", text="one, two, [ab]", after=(4001, 4002, 4003))
    for answer in run_requests(options, prompts, 0, depth, sampling=sampling, thinking=thinking, grammar=grammar):
        assert tuple(answer[10:13]) == end
        assert re.fullmatch("one, two, [ab]", tokenizer().decode(answer[13:]))


def test_free_rows_beside_constrained_ones_are_unchanged(engine: Engine) -> None:
    free = {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True}
    alone = [engine.generate(prompt, free)["output_ids"] for prompt in PROMPTS[:4]]
    constrained = {"json_schema": SHORT, "max_new_tokens": 96, "temperature": 1.0, "seed": 3}
    answers = engine.generate([*PROMPTS[:4], *PROMPTS[:4]], [*[free] * 4, *[constrained] * 4])
    assert [answer["output_ids"] for answer in answers[:4]] == alone
    for answer in answers[4:]:
        jsonschema.validate(json.loads(answer["text"]), SHORT)


def test_every_choice_has_a_matcher_of_its_own(engine: Engine) -> None:
    answers = engine.generate("Hi", {"regex": "[a-z]{3,9}-[0-9]{2}", "n": 6, "temperature": 1.5, "seed": 1})
    assert len(answers) == 6 and len({answer["text"] for answer in answers}) > 3
    for answer in answers:
        assert re.fullmatch("[a-z]{3,9}-[0-9]{2}", answer["text"])


def test_scores_are_there_for_forced_tokens(engine: Engine) -> None:
    asked = {"regex": "one, two, [ab], three", "temperature": 0}
    plain = engine.generate("Hi", asked)
    scored = engine.generate("Hi", asked, return_logprob=True, top_logprobs_num=2)
    assert scored["output_ids"] == plain["output_ids"]
    assert scored["meta_info"]["jump_forward_tokens"] == 0 < plain["meta_info"]["jump_forward_tokens"]
    entries = scored["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in entries] == scored["output_ids"] and all(value < 0 for value, _, _ in entries)


@pytest.mark.parametrize(
    ("fields", "text", "finish"),
    [
        ({"regex": "one, two, three, four, five", "stop": ["two, th"]}, "one, ", "stop"),
        ({"regex": "one, two, three, four, five", "max_new_tokens": 3}, "one, two", "length"),
        ({"regex": "^ab$"}, "ab", "stop"),
        ({"regex": "ab", "ignore_eos": True}, "ab", "stop"),
        ({"regex": "(a{2}){2}", "min_new_tokens": 3}, "aaaa", "stop"),
        ({"choice": ['a "quoted" choice']}, 'a "quoted" choice', "stop"),
        ({"ebnf": 'root ::= "x" y\ny ::= "y" | "y"'}, "xy", "stop"),
        ({"ebnf": 'start: "x" %json {"const": 1}'}, "x1", "stop"),
        ({"json_schema": {"enum": ['naïve 🙂 "x" \\ \n']}}, None, "stop"),
    ],
)
def test_texts_that_are_forced(engine: Engine, fields: dict[str, Any], text: str | None, finish: str) -> None:
    for temperature in (0, 1.0):
        answer = engine.generate("Say it:", {"temperature": temperature, "max_new_tokens": 64, **fields})
        assert answer["meta_info"]["finish_reason"]["type"] == finish
        if text is None:
            assert json.loads(answer["text"]) == fields["json_schema"]["enum"][0]
        else:
            assert answer["text"] == text


def test_streams_are_the_same_text(engine: Engine) -> None:
    asked = {"json_schema": FIXED, "temperature": 0, "max_new_tokens": 96}
    pieces = list(engine.generate(PROMPTS[0], asked, stream=True))
    whole = engine.generate(PROMPTS[0], asked)
    assert pieces[-1]["text"] == whole["text"] and pieces[-1]["output_ids"] == whole["output_ids"]
    assert len(pieces) > 3


def test_bad_grammars_are_the_clients_error_alone(engine: Engine) -> None:
    for fields, named in (
        ({"regex": "[a-z"}, "sampling_params.regex"),
        ({"json_schema": {"type": "array", "items": [5]}}, "sampling_params.json_schema"),
        ({"ebnf": "root ::= nosuch"}, "sampling_params.ebnf"),
        ({"regex": "a", "ebnf": "b"}, "sampling_params.ebnf"),
    ):
        for stream in (False, True):
            with pytest.raises(BadRequest) as caught:
                list(engine.generate("Hi", fields, stream=stream))
            assert caught.value.param == named
    mixed = engine.generate(["Hi", "Hi"], [{"regex": "(("}, {"regex": "ok"}])
    assert mixed[0]["meta_info"]["finish_reason"]["status_code"] == 400 and mixed[1]["text"] == "ok"


def test_what_is_cached_is_no_more_than_the_prompt(engine: Engine) -> None:
    engine.flush_cache()
    for _ in range(3):
        answer = engine.generate("Say it again:", {"regex": "one, two, three[ab]", "temperature": 0})
        assert answer["meta_info"]["cached_tokens"] <= answer["meta_info"]["prompt_tokens"]
