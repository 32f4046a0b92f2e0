"""NPAR, LOGP, MAXT, USAGE: what an answer holds and how a stream is framed."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from support.live import Server, deltas, finishes, together
from support.words import WIDE, chat_saying, saying


def scores(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The logprob entries of a chat stream."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]


def test_npar_1_choices_stream_under_their_own_index(plain: Server) -> None:
    chunks = plain.chat_stream("Hi", max_tokens=8, temperature=1, n=3, ignore_eos=True)
    assert {choice["index"] for chunk in chunks for choice in chunk["choices"]} == {0, 1, 2}
    for index in range(3):
        assert finishes(chunks, index) == ["length"]


def test_npar_2_best_of(plain: Server) -> None:
    asked = {"prompt": "Say it:", "max_tokens": 4, "temperature": 1, "n": 2}
    chunks = plain.complete_stream(**asked, best_of=2)
    assert {choice["index"] for chunk in chunks for choice in chunk["choices"]} == {0, 1}
    for best_of in (1, 3):
        error = plain.refused("/v1/completions", {"model": plain.model, **asked, "best_of": best_of})
        assert error["param"] == "best_of"


def test_npar_3_greedy_choices_are_equal(plain: Server) -> None:
    first, second = plain.complete(prompt="Say it:", max_tokens=4, n=2)["choices"]
    assert first["text"] == second["text"]


def test_logp_1_shape_in_chats(plain: Server) -> None:
    choice = plain.chat("Hi", max_tokens=3, logprobs=True, ignore_eos=True)["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == 3
    for entry in content:
        assert entry["logprob"] <= 0 and isinstance(entry["token"], str)
        assert all(isinstance(byte, int) for byte in entry["bytes"])
        assert entry["top_logprobs"] == []
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == choice["message"]["content"]


def test_logp_1_bytes_of_characters_in_parts(repeater: Server) -> None:
    """Tokens that are parts of a character have bytes that join to it."""
    choice = repeater.chat(**chat_saying(WIDE), max_tokens=64, logprobs=True)["choices"][0]
    content = choice["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == WIDE
    assert all(entry["logprob"] > -1e-3 for entry in content)


def test_logp_2_scoring_with_echo(plain: Server) -> None:
    prompt = "The quick brown fox"
    answer = plain.complete(prompt=prompt, max_tokens=0, echo=True, logprobs=1)
    choice = answer["choices"][0]
    assert choice["text"] == prompt
    found = choice["logprobs"]
    assert "".join(found["tokens"]) == prompt
    assert found["token_logprobs"][0] is None
    assert all(isinstance(value, float) for value in found["token_logprobs"][1:])
    assert answer["usage"]["completion_tokens"] == 0
    chunks = plain.complete_stream(prompt=prompt, max_tokens=0, echo=True, logprobs=1)
    assert "".join(deltas(chunks)) == prompt
    assert chunks[0]["choices"][0]["logprobs"] == found


def test_logp_2_scores_of_a_text_are_those_of_generating_it(plain: Server) -> None:
    made = plain.complete(prompt="The quick", max_tokens=12, logprobs=1, return_token_ids=True, ignore_eos=True)
    choice = made["choices"][0]
    whole = plain.tokenize(prompt="The quick") + choice["token_ids"]
    scored = plain.complete(prompt=whole, max_tokens=0, echo=True, logprobs=1)["choices"][0]["logprobs"]
    assert scored["token_logprobs"][-12:] == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-3)


def test_logp_3_minus_infinity_never_reaches_the_json(plain: Server) -> None:
    """The client refuses NaN and Infinity."""
    for top_k in (1, -1):
        found = plain.complete(
            prompt="blue bicycle under rain", max_tokens=2, temperature=1, echo=True, logprobs=1, top_k=top_k
        )["choices"][0]["logprobs"]
        values = [value for value in found["token_logprobs"] if value is not None]
        values += [value for top in found["top_logprobs"] if top for value in top.values()]
        assert all(abs(value) < 1e5 for value in values)


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": True, "top_logprobs": 1_000_000},
        {"logprobs": True, "top_logprobs": -1},
        {"logprobs": False, "top_logprobs": 3},
    ],
)
def test_logp_4_limits(plain: Server, fields: dict[str, Any]) -> None:
    body = {"model": plain.model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 64, **fields}
    assert plain.refused("/v1/chat/completions", body)["param"] == "top_logprobs"


def test_logp_5_streams_have_them_too(plain: Server) -> None:
    asked = {"max_tokens": 5, "logprobs": True, "top_logprobs": 2, "ignore_eos": True}
    streamed = scores(plain.chat_stream("Hi", **asked))
    whole = plain.chat("Hi", **asked)["choices"][0]["logprobs"]["content"]
    assert len(streamed) == 5
    for one, other in zip(streamed, whole, strict=True):
        assert one["token"] == other["token"] and one["bytes"] == other["bytes"]
        assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-3)
        assert [top["token"] for top in one["top_logprobs"]] == [top["token"] for top in other["top_logprobs"]]
        assert len(one["top_logprobs"]) == 2
        assert one["top_logprobs"][0]["logprob"] == pytest.approx(one["logprob"], abs=1e-3)


def test_logp_6_they_are_those_of_the_raw_model(plain: Server) -> None:
    asked = {"prompt": "The capital of France is", "max_tokens": 1, "logprobs": 1}
    plainly = plain.complete(**asked)["choices"][0]
    for changed in (
        {"temperature": 0.3, "top_k": 1},
        {"temperature": 2.0, "top_k": 1},
        {"repetition_penalty": 1.2},
        {"presence_penalty": 0.1, "min_p": 0.5},
    ):
        other = plain.complete(**{**asked, **changed})["choices"][0]
        assert other["text"] == plainly["text"]
        one, two = (choice["logprobs"]["token_logprobs"] for choice in (plainly, other))
        assert one == pytest.approx(two, abs=1e-3)


def test_maxt_1_null_means_default(plain: Server) -> None:
    answer = plain.complete(prompt="Say it:", max_tokens=None, ignore_eos=True)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 16
    assert plain.complete(prompt="Say it:", max_tokens=None)["choices"][0]["finish_reason"] in ("stop", "length")


@pytest.mark.parametrize("value", [-1, 1.5, "10x", 1e30, [], True])
def test_maxt_2_bad_values(plain: Server, value: Any) -> None:
    body = {"model": plain.model, "prompt": "Say it:", "max_tokens": value}
    assert plain.refused("/v1/completions", body)["param"] == "max_tokens"


@pytest.mark.parametrize("limit", [7, 1, 2, 33])
def test_maxt_3_the_limit_is_exact(plain: Server, limit: int) -> None:
    asked = {"prompt": "Say it:", "max_tokens": limit, "ignore_eos": True}
    answer = plain.complete(**asked)
    assert answer["usage"]["completion_tokens"] == limit
    assert answer["choices"][0]["finish_reason"] == "length"
    chunks = plain.complete_stream(**asked, stream_options={"include_usage": True})
    assert chunks[-1]["usage"]["completion_tokens"] == limit
    assert finishes(chunks) == ["length"]
    assert plain.chat("Hi", max_completion_tokens=limit, ignore_eos=True)["usage"]["completion_tokens"] == limit


def test_usage_1_the_usage_chunk(plain: Server) -> None:
    asked = {"max_tokens": 5, "ignore_eos": True}
    *chunks, last = plain.chat_stream("Hi", **asked, stream_options={"include_usage": True})
    assert last["choices"] == []
    assert all(chunk.get("usage") is None for chunk in chunks)
    usage, whole = last["usage"], plain.chat("Hi", **asked)["usage"]
    assert usage["completion_tokens"] == 5
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[name] == whole[name]
    assert all("usage" not in chunk for chunk in plain.chat_stream("Hi", **asked))


def test_usage_2_streams_always_end(plain: Server) -> None:
    """The client checks that there is one `[DONE]` and nothing after it."""
    kinds: list[dict[str, Any]] = [
        {"max_tokens": 1},
        {"max_tokens": 300},
        {"max_tokens": 300, "stop": "e"},
        {"max_tokens": 12, "n": 2, "temperature": 1},
        {"max_tokens": 0},
        {"max_tokens": 40, "stream_options": {"include_usage": True}},
    ]
    runs = [kind for kind in kinds for _ in range(5)]
    answers = together(partial(plain.chat_stream, "Hi", **asked) for asked in runs)
    for chunks, asked in zip(answers, runs, strict=True):
        for index in range(asked.get("n", 1)):
            assert len(finishes(chunks, index)) == 1


@pytest.mark.parametrize("most", [3, 80])
def test_usage_2_streams_of_tool_calls_end(plain: Server, most: int) -> None:
    """Whole calls, and calls that the limit cuts."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "boolean"}}}}}
    chunks = plain.chat_stream("Hi", tools=[tool], tool_choice="required", max_tokens=most)
    assert len(finishes(chunks)) == 1 and finishes(chunks)[0] in ("tool_calls", "length")


@pytest.mark.parametrize("most", [3, 80])
def test_usage_2_streams_of_reasoning_end(thinker: Server, most: int) -> None:
    chunks = thinker.chat_stream("Hi", max_tokens=most)
    assert len(finishes(chunks)) == 1 and finishes(chunks)[0] in ("stop", "length")


def test_usage_2_streams_that_stop_by_themselves_end(repeater: Server) -> None:
    for text in ("", "one", WIDE):
        chunks = repeater.complete_stream(prompt=saying(text), max_tokens=64)
        assert ("".join(deltas(chunks)), finishes(chunks)) == (text, ["stop"])


def test_usage_3_counts_agree(plain: Server) -> None:
    asked = {"max_tokens": 6, "ignore_eos": True}
    whole = plain.chat("Hi", **asked)["usage"]
    streamed = plain.chat_stream("Hi", **asked, stream_options={"include_usage": True})[-1]["usage"]
    counted = len(plain.tokenize(messages=[{"role": "user", "content": "Hi"}]))
    assert whole["prompt_tokens"] == streamed["prompt_tokens"] == counted
    for usage in (whole, streamed):
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_usage_4_the_frame_of_chunks(plain: Server) -> None:
    """The client checks that every line is `data: <json>` or blank, and the content type."""
    chunks = plain.chat_stream("Hi", max_tokens=4)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == len({chunk["created"] for chunk in chunks}) == 1
    assert {chunk["model"] for chunk in chunks} == {plain.model}
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
