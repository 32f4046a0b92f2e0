"""The default model end to end: cases whose point shows best with a model that can talk."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from support.live import Server, deltas, finishes, together
from support.words import encode

QUESTION = "What is the capital of France?"


def test_a_real_answer(real: Server) -> None:
    answer = real.chat(QUESTION, max_tokens=32)
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["model"] == "smollm2"
    assert "".join(deltas(real.chat_stream(QUESTION, max_tokens=32))) == answer["choices"][0]["message"]["content"]


def test_stop_strings_out_of_its_own_words(real: Server) -> None:
    """Every stop of its own answer cuts it there, in a stream, however tokens and stops cross."""
    text = real.text(prompt="The capital of France is", max_tokens=24)
    assert len(text) > 37
    stops = [text[i : i + size] for i, size in ((0, 1), (3, 4), (10, 7), (20, 1), (25, 12))]
    streams = together(
        partial(real.complete_stream, prompt="The capital of France is", max_tokens=24, stop=[stop]) for stop in stops
    )
    for stop, chunks in zip(stops, streams, strict=True):
        assert ("".join(deltas(chunks)), finishes(chunks)) == (text[: text.index(stop)], ["stop"])


def test_logp_1_bytes_join_to_the_text(real: Server) -> None:
    choice = real.chat("Say something with emoji and čeština.", max_tokens=24, logprobs=True)["choices"][0]
    joined = bytes(byte for entry in choice["logprobs"]["content"] for byte in entry["bytes"])
    assert joined.decode("utf-8", "replace") == choice["message"]["content"]


@pytest.mark.parametrize("temperature", [1e-6, 1e-300])
def test_samp_1_tiny_temperatures(real: Server, temperature: float) -> None:
    asked = {"prompt": "The capital of France is", "max_tokens": 12}
    assert real.text(**asked, temperature=temperature) == real.text(**asked)


def test_pen_1_a_penalty_shows_and_stays_with_its_request(real: Server) -> None:
    asked = {"prompt": "a b a b a b", "max_tokens": 16}
    calls = [partial(real.text, **asked, repetition_penalty=1.7), partial(real.text, **asked)]
    penalised, plainly = (call() for call in calls)
    assert penalised != plainly
    others = [partial(real.text, prompt=f"Count from {i}:", max_tokens=16, presence_penalty=i / 3) for i in range(6)]
    assert together([*calls, *others])[:2] == [penalised, plainly]
    assert together([*others, *calls])[-2:] == [penalised, plainly]


def test_cache_6_turns_reuse_turns(real: Server) -> None:
    messages: list[dict[str, Any]] = []
    known = 0
    for question in ("Name a colour.", "Another one?", "And one more?"):
        messages.append({"role": "user", "content": question})
        answer = real.chat(messages=messages, max_tokens=24)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= known
        known = answer["usage"]["prompt_tokens"]
        messages.append(answer["choices"][0]["message"])


def test_seed_1_sampled_text_repeats(real: Server) -> None:
    asked = {"prompt": "Once upon", "max_tokens": 24, "temperature": 1}
    first = real.text(**asked, seed=42)
    assert real.text(**asked, seed=42) == first != real.text(**asked, seed=43)
    assert "".join(deltas(real.complete_stream(**asked, seed=42))) == first


def test_gguf_1_the_tokenizer_of_the_file(real: Server) -> None:
    """Ids that other readers of this file agree on (see tests/unit/test_tokenizer.py for the reading itself)."""
    text = "Grüße aus Wien! 42 — こんにちは 🙂  two"
    tokens = real.tokenize(prompt=text)
    assert tokens == encode(text)
    assert real.ask("/detokenize", {"tokens": tokens})["text"] == text
    chat = real.tokenize(messages=[{"role": "user", "content": "Hi"}])
    assert chat.count(1) == 3 and chat.count(2) == 2
