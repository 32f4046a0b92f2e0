"""`select`: the choice that scoring each continuation alone finds, and the three ways to weigh tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

import radixlm as rl
from radixlm import Engine
from radixlm.lang.backends.base import Scored
from radixlm.lang.choices import METHODS, choose
from support.programs import null_engine

PROMPTS = ["The capital of France is", "Is it true? Answer yes or no:", "x = ", "A word that ends in the mid"]
CHOICES = [" Paris", " London", " Paris, of course", "dle", "night", " yes", "no", "1", "23"]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with null_engine() as engine:
        yield engine


def alone(engine: Engine, ids: list[int], start: int) -> list[float]:
    answer = engine.generate(None, {"max_new_tokens": 0}, input_ids=ids, return_logprob=True, logprob_start_len=start)
    return [entry[0] or 0.0 for entry in answer["meta_info"]["input_token_logprobs"]]


def scored_alone(engine: Engine, prompt: list[int], rows: list[list[int]]) -> list[Scored]:
    """Each continuation in a request of its own, with an empty cache."""
    common = [next((i for i, (a, b) in enumerate(zip(prompt, row)) if a != b), len(prompt)) for row in rows]  # noqa: B905
    start = min(common)
    found = []
    for row in rows:
        engine.flush_cache()
        given = alone(engine, row, start)
        found.append(Scored(tuple(row[start:]), tuple(given), tuple(alone(engine, row[start:], 0))))
    return found


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_select_is_what_scoring_alone_finds(engine: Engine, prompt: str, method: str) -> None:
    @rl.function
    def program(s: Any) -> None:
        s += prompt
        s += rl.select("choice", choices, choices_method=method)

    rng = random.Random(prompt)
    for _ in range(4):
        choices = rng.sample(CHOICES, rng.randrange(2, 6))
        state = program.run(backend=engine)
        scored = scored_alone(engine, engine.encode(prompt), [engine.encode(prompt + choice) for choice in choices])
        index, meta = choose(method, choices, scored)
        assert state["choice"] == choices[index] and state.text() == prompt + choices[index]
        assert state.get_meta_info("choice")["scores"] == pytest.approx(meta["scores"])


def test_select_in_a_chat(engine: Engine) -> None:
    choices = [" yes", " no, never"]

    @rl.function
    def program(s: Any, begun: str) -> None:
        s += rl.user("Is it?")
        with s.assistant():
            s += begun + rl.select("choice", choices)

    for begun in ("", "I say:"):
        state = program.run(begun, backend=engine)

        def render(text: str) -> list[int]:
            messages = [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": text}]
            return engine.render(messages, add_generation_prompt=False, continue_final_message=True)

        scored = scored_alone(engine, render(begun), [render(begun + choice) for choice in choices])
        assert state["choice"] == choices[choose("token_length_normalized", choices, scored)[0]]
        assert state.messages()[-1]["content"] == begun + state["choice"]


def test_the_prompt_is_computed_once(engine: Engine) -> None:
    text = "A long prompt that several choices share, so that it should be computed one time only. " * 4
    choices = [f" choice {i}" for i in range(8)]

    @rl.function
    def program(s: Any) -> None:
        s += text + rl.select("choice", choices)

    engine.flush_cache()
    before = engine.stats()
    assert program.run(backend=engine)["choice"] in choices
    after = engine.stats()
    computed = after["prompt_tokens"] - after["cached_tokens"] - before["prompt_tokens"] + before["cached_tokens"]
    own = sum(len(engine.encode(text + choice)) - len(engine.encode(text)) for choice in choices)
    assert computed <= len(engine.encode(text)) + own + 2 * len(choices)


def test_nothing_to_go_by(engine: Engine) -> None:
    @rl.function
    def program(s: Any) -> None:
        s += rl.select("choice", ["a", "b"])

    with pytest.raises(rl.ProgramError, match="select needs something before it"):
        program.run(backend=engine)["choice"]


def test_methods_on_figures_made_by_hand() -> None:
    short = Scored((1, 2), (-1.0, -3.0), (-1.5, -3.5))
    long = Scored((1, 3, 4), (-1.0, -2.0, -2.0), (-0.1, -0.1, -0.1))
    other = Scored((5,), (-1.2,), (-0.2,))
    three = [short, long, other]

    def best(method: str, scored: list[Scored]) -> int:
        return choose(method, [str(i) for i in range(len(scored))], scored)[0]

    assert best("token_length_normalized", three) == 2  # -2, -1.67, -1.2
    assert best("unconditional_likelihood_normalized", three) == 0  # 0.5, -1.57, -1
    assert best("greedy_token_selection", three) == 1  # the first two share their first token; then -2 beats -3
    prefix = [Scored((1,), (-0.5,)), Scored((1, 2), (-0.5, -0.1))]
    assert best("greedy_token_selection", prefix) == 1
    prefix[1] = Scored((1, 2), (-0.5, -4.0))
    assert best("greedy_token_selection", prefix) == 0
    assert best("token_length_normalized", [short, short]) == 0
