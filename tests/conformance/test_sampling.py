"""SAMP, SEED, PEN: how tokens are chosen."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from support.live import Server, deltas, finishes, together

COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize("temperature", [1e-6, 1e-4, 1e-12, 1e-38, 1e-300])
def test_samp_1_tiny_temperatures_are_greedy(plain: Server, temperature: float) -> None:
    asked = {"prompt": "The capital of France is", "max_tokens": 12}
    assert plain.text(**asked, temperature=temperature) == plain.text(**asked, temperature=0)


@pytest.mark.parametrize("temperature", [-0.1, "hot", [], True, 1e400])
def test_samp_2_bad_temperatures(plain: Server, temperature: Any) -> None:
    if temperature == 1e400:  # JSON can say a number that no float holds
        body = '{"model": "tiny", "prompt": "Say it:", "max_tokens": 4, "temperature": 1e400}'
        response = plain.http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400
        return
    error = plain.refused(COMPLETIONS, {"model": plain.model, "prompt": "Say it:", "temperature": temperature})
    assert error["param"] == "temperature"


def test_samp_2_two_is_accepted(plain: Server) -> None:
    assert plain.complete(prompt="Say it:", max_tokens=4, temperature=2.0)


def test_samp_3_top_k(plain: Server) -> None:
    asked = {"prompt": "Once", "max_tokens": 12, "temperature": 1.5, "seed": 4}
    free, greedy = plain.text(**asked), plain.text(prompt="Once", max_tokens=12)
    assert free != greedy
    assert plain.text(**asked, top_k=-1) == free
    assert plain.text(**asked, top_k=10**9) == free
    assert plain.text(**asked, top_k=1) == greedy
    for bad in (0, -2, 1.5):
        assert plain.refused(COMPLETIONS, {"model": plain.model, **asked, "top_k": bad})["param"] == "top_k"


@pytest.mark.parametrize(
    ("name", "value"),
    [("top_p", 0), ("top_p", 1.1), ("top_p", -0.5), ("min_p", 1.5), ("min_p", -0.1), ("min_tokens", -1), ("n", 0)],
)
def test_samp_ranges_of_the_others(plain: Server, name: str, value: float) -> None:
    assert plain.refused(COMPLETIONS, {"model": plain.model, "prompt": "Say it:", name: value})["param"] == name


def test_samp_5_null_means_default_everywhere(plain: Server) -> None:
    names = (
        "temperature", "top_p", "n", "stop", "seed", "logit_bias", "tools", "tool_choice", "response_format",
        "presence_penalty", "frequency_penalty", "logprobs", "top_logprobs", "stream", "stream_options", "user",
    )  # fmt: skip
    answer = plain.chat("Hi", max_tokens=64, **dict.fromkeys(names))
    assert answer["choices"][0]["finish_reason"] in ("stop", "length")


def test_seed_1_same_seed_same_text(plain: Server) -> None:
    asked = {"prompt": "Once upon", "max_tokens": 24, "temperature": 1}
    first = plain.text(**asked, seed=42)
    assert plain.text(**asked, seed=42) == first
    assert plain.text(**asked, seed=43) != first
    assert "".join(deltas(plain.complete_stream(**asked, seed=42))) == first


def test_seed_1_whatever_else_runs(plain: Server) -> None:
    """Alone and from a cold cache, in company, streamed, and from a warm one: 32 texts of 48 tokens."""
    asked = {"prompt": "Once upon", "max_tokens": 48, "temperature": 1, "ignore_eos": True}
    plain.flush()
    alone = [plain.text(**asked, seed=seed) for seed in range(32)]
    for _ in range(2):
        assert together(partial(plain.text, **asked, seed=seed) for seed in range(32)) == alone
    streams = together(partial(plain.complete_stream, **asked, seed=seed) for seed in range(32))
    assert ["".join(deltas(chunks)) for chunks in streams] == alone


@pytest.mark.parametrize("filter", [{"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.02, "temperature": 1.5}])
def test_seed_1_with_filters(plain: Server, filter: dict[str, Any]) -> None:
    asked = {"prompt": "Once upon", "max_tokens": 48, "temperature": 1, "ignore_eos": True, **filter}
    alone = [plain.text(**asked, seed=seed) for seed in range(16)]
    assert together(partial(plain.text, **asked, seed=seed) for seed in range(16)) == alone


def test_seed_2_with_n_zero_and_large_seeds(plain: Server) -> None:
    asked = {"prompt": "Once upon", "max_tokens": 16, "temperature": 1}
    first, second = ([choice["text"] for choice in plain.complete(**asked, seed=0, n=3)["choices"]] for _ in range(2))
    assert first == second and len(set(first)) == 3
    assert first[0] == plain.text(**asked, seed=0)
    assert plain.text(**asked, seed=-1) == plain.text(**asked, seed=-1)
    for bad in (2**63, "a", 1.5):
        assert plain.refused(COMPLETIONS, {"model": plain.model, **asked, "seed": bad})["param"] == "seed"


def test_pen_1_in_a_mixed_batch(plain: Server) -> None:
    asked = {"prompt": "a b a b a b", "max_tokens": 16}
    alone = [plain.text(**asked, repetition_penalty=1.7), plain.text(**asked)]
    both = [partial(plain.text, **asked, repetition_penalty=1.7), partial(plain.text, **asked)]
    others = [
        partial(plain.text, prompt=f"Others {i}", max_tokens=16, temperature=1, frequency_penalty=i / 4)
        for i in range(6)
    ]
    assert together([*both, *others])[:2] == alone
    assert together([*others, *reversed(both)])[-2:] == alone[::-1]


@pytest.mark.parametrize(
    ("name", "value"),
    [("repetition_penalty", 0), ("repetition_penalty", -1), ("presence_penalty", 2.1), ("frequency_penalty", -2.1)],
)
def test_pen_2_ranges(plain: Server, name: str, value: float) -> None:
    error = plain.refused(COMPLETIONS, {"model": plain.model, "prompt": "Say it:", "max_tokens": 64, name: value})
    assert error["param"] == name


@pytest.mark.parametrize("value", [2, -2])
def test_pen_2_the_ends_of_the_range(plain: Server, value: float) -> None:
    assert plain.complete(prompt="Say it:", max_tokens=4, presence_penalty=value)


def test_pen_penalties_are_applied(repeater: Server) -> None:
    """The repeater is so sure of itself that only what forbids a token outright stops it; a bias of its own does."""
    prompt = [100 + i for i in range(64)]
    asked = {"prompt": prompt, "max_tokens": 8, "return_token_ids": True}
    assert repeater.complete(**asked)["choices"][0]["token_ids"] == prompt[:8]
    biased = repeater.complete(**asked, logit_bias={"103": -100, "777": 60})["choices"][0]["token_ids"]
    assert biased[:4] == [100, 101, 102, 777]


def test_min_tokens_hold_off_the_end(plain: Server) -> None:
    asked = {"prompt": "Say it:", "max_tokens": 8, "logit_bias": {"2": 100}}
    assert plain.complete(**asked)["usage"]["completion_tokens"] == 1
    answer = plain.complete(**asked, min_tokens=5)
    assert answer["usage"]["completion_tokens"] == 6
    assert finishes(plain.complete_stream(**asked, min_tokens=5)) == ["stop"]
