"""STR and STOP: how tokens become text in a stream, and what text ends it. The repeater says each text exactly."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from support.live import Server, deltas, finishes, together
from support.words import EOS, WIDE, chat_saying, saying

COUNTING = "one, two, three, four, five"


def said(server: Server, text: str, **fields: Any) -> tuple[str, str]:
    """Text and finish reason of an answer that would be `text`. All routes, whole or streamed, must agree on both."""
    fields = {"max_tokens": 64, **fields}
    answers = []
    whole = server.complete(prompt=saying(text), **fields)["choices"][0]
    answers.append((whole["text"], whole["finish_reason"]))
    whole = server.chat(**chat_saying(text), **fields)["choices"][0]
    answers.append((whole["message"]["content"], whole["finish_reason"]))
    for chunks in (
        server.complete_stream(prompt=saying(text), **fields),
        server.chat_stream(**chat_saying(text), **fields),
    ):
        (finish,) = finishes(chunks)
        pieces = deltas(chunks)
        assert "�" not in "".join(pieces)
        answers.append(("".join(pieces), finish))
    native = {"max_new_tokens": fields["max_tokens"], "temperature": 0}
    if "include_stop_str_in_output" in fields:
        native["no_stop_trim"] = fields["include_stop_str_in_output"]
    if "stop" in fields:
        native["stop"] = fields["stop"]
    generated = server.ask("/generate", {"input_ids": saying(text), "sampling_params": native})
    answers.append((generated["text"], generated["meta_info"]["finish_reason"]["type"]))
    assert len(set(answers)) == 1, answers
    return answers[0]


@pytest.mark.parametrize(
    "text", [WIDE, "漢字かな交じり文🙂🙃", "e\u0301 ñ ô\u0323\u0300", "\u202er\u202c \u200b\ufeff"]
)
def test_str_1_characters_of_several_tokens_arrive_whole(repeater: Server, text: str) -> None:
    assert said(repeater, text) == (text, "stop")


@pytest.mark.parametrize("text", [" two  spaces, then  three", "   ", "\n\n a\tb \r\n", " ", "a  "])
def test_str_2_leading_and_repeated_spaces_survive(repeater: Server, text: str) -> None:
    assert said(repeater, text) == (text, "stop")


def test_str_3_random_output_is_valid_json(plain: Server) -> None:
    """The client reads every byte of body and stream strictly."""
    wild = {"prompt": "Say it:", "max_tokens": 48, "temperature": 2.0, "top_k": -1, "top_p": 1}
    whole = [partial(plain.complete, **wild, seed=seed) for seed in range(1, 51)]
    streamed = [partial(plain.complete_stream, **wild, seed=seed) for seed in range(1, 51)]
    for first in range(0, 50, 10):
        assert all(answer["choices"][0]["finish_reason"] for answer in together(whole[first : first + 10]))
        assert all(len(finishes(chunks)) == 1 for chunks in together(streamed[first : first + 10]))


@pytest.mark.parametrize(("skip", "text"), [(True, ""), (False, "<|im_end|>" * 8)])
def test_str_4_special_tokens_are_hidden_or_shown(plain: Server, skip: bool, text: str) -> None:
    asked = {
        "prompt": "Say it:", "max_tokens": 8, "ignore_eos": True, "logit_bias": {str(EOS): 100},
        "skip_special_tokens": skip,
    }  # fmt: skip
    answer = plain.complete(**asked)
    assert answer["choices"][0]["text"] == text
    assert answer["usage"]["completion_tokens"] == 8
    assert "".join(deltas(plain.complete_stream(**asked))) == text


def test_stop_1_a_stop_string_across_tokens_is_cut_exactly(repeater: Server) -> None:
    assert said(repeater, COUNTING, stop=["two, th"]) == ("one, ", "stop")
    chunks = repeater.complete_stream(prompt=saying(COUNTING), max_tokens=64, stop=["two, th"])
    assert chunks[-1]["choices"][0]["matched_stop"] == "two, th"


def test_stop_1_wherever_it_begins_and_ends(repeater: Server) -> None:
    """Every stop string of five characters in two texts."""
    for text in (COUNTING, WIDE):
        stops = [text[i : i + 5] for i in range(len(text) - 4)]
        asked = {"prompt": saying(text), "max_tokens": 64}
        answers = together(partial(repeater.complete_stream, **asked, stop=stop) for stop in stops)
        for stop, chunks in zip(stops, answers, strict=True):
            assert ("".join(deltas(chunks)), finishes(chunks)) == (text[: text.index(stop)], ["stop"])


def test_stop_2_the_stop_is_kept_and_nothing_after_it(repeater: Server) -> None:
    found = said(repeater, COUNTING, stop=["two, th"], include_stop_str_in_output=True)
    assert found == ("one, two, th", "stop")


def test_stop_3_text_after_the_stop_in_the_same_token_is_dropped(repeater: Server) -> None:
    assert said(repeater, COUNTING, stop="w") == ("one, t", "stop")
    assert said(repeater, COUNTING, stop="w", include_stop_str_in_output=True) == ("one, tw", "stop")


def test_stop_4_a_blank_line(repeater: Server) -> None:
    assert said(repeater, "a\n\nb", stop=["\n\n"]) == ("a", "stop")


@pytest.mark.parametrize("stop", [[""], None, [], ["", "zzz"]])
def test_stop_5_odd_lists_stop_nothing(repeater: Server, stop: list[str] | None) -> None:
    answer = repeater.complete(prompt=saying(COUNTING), max_tokens=64, stop=stop)
    assert answer["choices"][0]["text"] == COUNTING


@pytest.mark.parametrize(
    ("regex", "stop", "text"),
    [
        (WIDE, None, WIDE),
        (" two  spaces, then  three", None, " two  spaces, then  three"),
        (COUNTING, ["two, th"], "one, "),
        (COUNTING, "w", "one, t"),
        ("a\\n\\nb", ["\n\n"], "a"),
        (COUNTING, [""], COUNTING),
    ],
)
def test_str_and_stop_of_text_forced_by_a_regex(plain: Server, regex: str, stop: Any, text: str) -> None:
    asked = {"prompt": "Say it:", "max_tokens": 128, "regex": regex, "stop": stop}
    assert plain.text(**asked) == "".join(deltas(plain.complete_stream(**asked))) == text
