"""The verbs that load a model, with the default model."""

from __future__ import annotations

import io
import re
import sys

import pytest

from radixlm.cli import demo
from radixlm.cli.main import main
from radixlm.config.options import OPTIONS

#: Float32, where cold and warm answers are the same; a pool that leaves memory to other tests.
SMALL = ["--dtype", "float32", "--max-total-tokens", "4096"]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for option in OPTIONS:
        monkeypatch.delenv(option.env, raising=False)


def test_run_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "What is the capital of France?", "--temperature", "0", "--stats", *SMALL]) == 0
    captured = capsys.readouterr()
    assert captured.out == "The capital of France is Paris.\n"
    assert "8 tokens" in captured.err


def test_the_second_turn_of_a_chat_finds_the_first_in_the_cache(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is the capital of France?\nAnd of Italy?\n/bye\n"))
    assert main(["chat", "--temperature", "0", "--max-tokens", "16", *SMALL]) == 0
    out = capsys.readouterr().out
    assert "Paris" in out
    assert "Rome" in out
    (first_prompt, first_cached), (second_prompt, second_cached) = [
        tuple(map(int, figures)) for figures in re.findall(r"prompt (\d+) tokens, (\d+) cached", out)
    ]
    assert first_cached == 0
    assert first_prompt <= second_cached < second_prompt


def test_the_demo_shows_what_the_tree_saves(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *SMALL]) == 0
    out = capsys.readouterr().out
    for question in demo.QUESTIONS:
        assert f"Q: {question}" in out
    assert "1871" in out
    assert "197 steps" in out
    prompts, cached, computed = (
        [int(number) for number in re.search(rf"{name}\s+(\d+)\s+(\d+)", out).groups()]  # type: ignore[union-attr]
        for name in ("prompt tokens", "found in the tree", "computed")
    )
    assert prompts[0] > 500
    assert cached[0] < 8  # the template's first tokens, which the warm-up shares
    assert cached[1] > 0.9 * prompts[1]
    assert computed[1] == prompts[1] - cached[1]
    assert "times sooner" in out


def test_doctor_tells_choices_and_the_memory_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *SMALL]) == 0
    out = capsys.readouterr().out
    for part in ("machine", "devices", "optional packages", "decode attention", "4,096 tokens", "can serve it"):
        assert part in out


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["run", "no/such/dir/model.gguf", "hi"], "there is no file or directory no/such/dir/model.gguf"),
        (["run", "smolm2", "hi"], "did you mean 'smollm2'?"),
        (["run", "hi", "--attention-backend", "nonesuch"], "unknown attention backend 'nonesuch'"),
        (["run", "hi", "--context-length", "999999"], "--context-length is 999999"),
        (["run", "hi", "--temperature", "-1", *SMALL], "temperature is -1.0"),
        (["doctor", "--max-total-tokens", "999999999"], "use --max-total-tokens"),
    ],
)
def test_a_model_or_setting_that_cannot_be_is_one_line(
    argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("radixlm: error: ")
    assert complaint in last
