"""Scores of continuations are the model's own log-probabilities, whatever they share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from radixlm import Engine
from radixlm.base.errors import BadRequest
from support import tiny

PROMPT = "The quick brown fox jumps over the lazy dog. " * 8 + "The answer is"
CHOICES = [" yes", " no", " perhaps, or perhaps not", ".", "\n\n", " yes and no"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model = str(tiny.random_model(tmp_path_factory.mktemp("score") / "random"))
    with Engine(model=model, dtype="float32", threads=1, max_total_tokens=20_000) as engine:
        yield engine
        engine.audit()


def by_echo(engine: Engine, ids: list[int], start: int) -> list[float]:
    """The same through `/generate`, one text at a time, nothing cached."""
    engine.flush_cache()
    params = {"max_new_tokens": 0, "temperature": 0}
    answer = engine.generate(input_ids=ids, sampling_params=params, return_logprob=True, logprob_start_len=start)
    return [value for value, _, _ in answer["meta_info"]["input_token_logprobs"]]


def test_scores_are_those_of_the_whole_text(engine: Engine) -> None:
    engine.flush_cache()
    found = engine.score(PROMPT, CHOICES)
    prompt = engine.encode(PROMPT)
    for choice, scored in zip(CHOICES, found, strict=True):
        assert engine.decode(scored["token_ids"]) == choice
        assert scored["token_logprobs"] == pytest.approx(
            by_echo(engine, [*prompt, *scored["token_ids"]], len(prompt)), abs=1e-4
        )
        assert scored["logprob"] == pytest.approx(sum(scored["token_logprobs"]))
        assert scored["mean_logprob"] == pytest.approx(scored["logprob"] / len(scored["token_ids"]))


def test_the_prompt_is_computed_once(engine: Engine) -> None:
    engine.flush_cache()
    cached = [scored["cached_tokens"] for scored in engine.score(PROMPT, CHOICES)]
    shared = len(engine.encode(PROMPT)) - 1
    assert sorted(cached) == [0] + [shared] * (len(CHOICES) - 1)


def test_ids_are_taken_as_they_are(engine: Engine) -> None:
    prompt, ids = [5, 6, 7], [[100], [200, 300]]
    assert [scored["token_ids"] for scored in engine.score(prompt, ids)] == ids


def test_a_token_across_the_border_leaves_the_prompt_alone(engine: Engine) -> None:
    (scored,) = engine.score("The ans", ["wer"])
    assert engine.decode(scored["token_ids"]) == "wer"


@pytest.mark.parametrize(
    ("prompt", "continuations"), [("Hi", []), ("Hi", [""]), ("", ["a"]), ("Hi", [[10**9]]), ("Hi", [["x"]])]
)
def test_what_cannot_be_scored_is_refused(engine: Engine, prompt: Any, continuations: Any) -> None:
    with pytest.raises(BadRequest):
        engine.score(prompt, continuations)
