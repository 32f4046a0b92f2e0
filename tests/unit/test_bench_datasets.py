"""Workloads: the same seed gives the same sessions, and they have the lengths and prefixes that were asked for."""

from __future__ import annotations

import json
import random
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixlm.base.errors import BadRequest, StartupError
from radixlm.bench import source
from radixlm.bench.datasets import Session, Spec, Turn, build
from radixlm.bench.source import Cutter, Source

WORDS = source.Source("test", "word " * 4000, ids=array("i", range(4000)), characters_per_token=5.0)
RANDOM = source.random_ids(1000)


def only(session: Session) -> Turn:
    (turn,) = session.turns
    return turn


def encode(text: str) -> list[int]:
    return [len(word) for word in text.split()]


specs = st.builds(
    Spec,
    name=st.sampled_from(["random", "shared-prefix", "multi-turn"]),
    count=st.integers(1, 30),
    input_len=st.integers(1, 60),
    output_len=st.integers(1, 20),
    range_ratio=st.floats(0, 1),
    groups=st.integers(1, 40),
    shared_len=st.integers(1, 50),
    own_len=st.integers(1, 20),
    turns=st.integers(1, 4),
    seed=st.integers(),
    as_text=st.booleans(),
)


@settings(deadline=None)
@given(specs, st.sampled_from([WORDS, RANDOM]))
def test_a_workload_is_a_function_of_its_spec(spec: Spec, origin: Source) -> None:
    assert build(spec, origin) == build(spec, origin)
    turns = [turn for session in build(spec, origin) for turn in session.turns]
    assert all((turn.text is None) != (turn.ids is None) and (turn.ids is None) == spec.as_text for turn in turns)
    assert len(turns) == spec.count * (spec.turns if spec.name == "multi-turn" else 1)


@settings(deadline=None)
@given(specs.filter(lambda spec: spec.name == "random" and not spec.as_text))
def test_random_lengths_are_in_range(spec: Spec) -> None:
    for session in build(spec, RANDOM):
        turn = only(session)
        assert max(1, round(spec.input_len * spec.range_ratio)) <= len(turn.ids or ()) <= spec.input_len
        assert max(1, round(spec.output_len * spec.range_ratio)) <= turn.max_tokens <= spec.output_len


def test_random_lengths_fill_their_range() -> None:
    sessions = build(Spec(count=2000, input_len=100, output_len=10, range_ratio=0.5), RANDOM)
    lengths = [len(only(session).ids or ()) for session in sessions]
    assert (min(lengths), max(lengths)) == (50, 100)
    assert abs(sum(lengths) / len(lengths) - 75) < 2
    assert {only(session).max_tokens for session in sessions} == set(range(5, 11))


def test_other_seeds_give_other_prompts() -> None:
    spec = Spec(count=5, input_len=20)
    assert build(spec, WORDS) != build(replace(spec, seed=1), WORDS)


@settings(deadline=None)
@given(specs.filter(lambda spec: spec.name == "shared-prefix" and not spec.as_text))
def test_prefixes_are_shared_evenly(spec: Spec) -> None:
    prompts = [only(session).ids or () for session in build(spec, WORDS)]
    assert {len(prompt) for prompt in prompts} == {spec.shared_len + spec.own_len}
    prefixes = [prompt[: spec.shared_len] for prompt in prompts]
    counts = [prefixes.count(prefix) for prefix in set(prefixes)]
    assert len(counts) == min(spec.groups, spec.count)
    assert max(counts) - min(counts) <= 1


def test_shared_prefixes_are_mixed() -> None:
    prompts = [only(session).ids or () for session in build(Spec(name="shared-prefix", count=64, groups=2), WORDS)]
    groups = [prompt[0] for prompt in prompts]
    assert groups != sorted(groups) and groups[::2] != groups[1::2]


def test_shared_text_has_a_common_start() -> None:
    spec = Spec(name="shared-prefix", count=6, groups=1, shared_len=10, own_len=2, as_text=True)
    texts = [only(session).text or "" for session in build(spec, WORDS)]
    assert len({text[:50] for text in texts}) == 1 and len(texts[0]) == 50 + 2 + 10


def test_cuts_do_not_repeat() -> None:
    cutter = Cutter(WORDS, random.Random(0))
    starts = [cutter.ids(50)[0] for _ in range(1500)]
    assert len(set(starts)) == len(starts)
    assert all(cutter.ids(50) for _ in range(5000))  # more than there are places


def test_random_ids_are_in_the_vocabulary() -> None:
    ids = Cutter(RANDOM, random.Random(0)).ids(20_000)
    assert min(ids) == source.FIRST_RANDOM_ID and max(ids) == 999


def test_the_text_is_real_and_tokenised_whole() -> None:
    origin = source.tokenised(encode, "words")
    assert len(origin.ids or ()) > 50_000
    assert 4 < origin.characters_per_token < 12
    assert "the" in Cutter(origin, random.Random(0)).text(500).split()


def test_prompts_longer_than_the_text() -> None:
    with pytest.raises(BadRequest, match="longer than the text it is cut from"):
        build(Spec(input_len=5000), WORDS)
    with pytest.raises(BadRequest, match="need a tokenizer or a vocabulary size"):
        build(Spec(), source.plain_text())


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"name": "nonsense"}, "dataset_name"),
        ({"count": 0}, "count"),
        ({"output_len": -1}, "output_len"),
        ({"range_ratio": 1.5}, "range_ratio"),
        ({"range_ratio": float("nan")}, "range_ratio"),
        ({"name": "custom"}, "path"),
    ],
)
def test_bad_specs(change: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        build(replace(Spec(), **change), WORDS)
    assert caught.value.param == param


# ---- files


def conversation(question: str, answer: str) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}


def custom(path: Path, text: str, **changes: Any) -> list[Turn]:
    path.write_text(text)
    spec = replace(Spec(name="custom", path=str(path), output_len=7), **changes)
    return [only(session) for session in build(spec, WORDS, encode)]


def test_prompt_lines(tmp_path: Path) -> None:
    text = '{"prompt": "one two", "max_tokens": 3}\n\n{"prompt": "three", "output_tokens": "?"}\n{"other": 1}\n'
    turns = custom(tmp_path / "p.jsonl", text)
    assert sorted(turns, key=lambda turn: turn.max_tokens) == [Turn(3, ids=(3, 3)), Turn(7, ids=(5,))]
    assert custom(tmp_path / "p.jsonl", text, as_text=True, count=1)[0].text in ("one two", "three")


def test_sharegpt_keeps_usable_conversations_and_survives_a_cut(tmp_path: Path) -> None:
    good = [conversation(f"q{i} b c d", " ".join(["w"] * (5 + i))) for i in range(20)]
    bad = [conversation("too short", "w w w w w"), conversation("q " * 2000, "w " * 9), {"conversations": []}, 5, {}]
    whole = json.dumps(good + bad)
    turns = custom(tmp_path / "s.json", whole)
    assert {turn.max_tokens for turn in turns} == set(range(5, 25))
    assert all(len(turn.ids or ()) == 4 for turn in turns)
    cut = custom(tmp_path / "s.json", whole[: whole.index("q10") + 1])
    assert {turn.max_tokens for turn in cut} == set(range(5, 15))
    some = custom(tmp_path / "s.json", whole, count=4)
    assert len(some) == 4 and some == custom(tmp_path / "s.json", whole, count=4)
    assert some != custom(tmp_path / "s.json", whole, count=4, seed=1)


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="line 2: not JSON"):
        custom(tmp_path / "x", '{"prompt": "a"}\nnonsense\n')
    with pytest.raises(BadRequest, match="holds no usable prompt"):
        custom(tmp_path / "x", "[{}]")
    with pytest.raises(BadRequest, match="cannot read"):
        build(Spec(name="custom", path=str(tmp_path / "missing")), WORDS)
    with pytest.raises(StartupError, match="no tokenizer at"):
        source.load_tokenizer(str(tmp_path))
    with pytest.raises(BadRequest, match="too small"):
        source.random_ids(100)
    with pytest.raises(StartupError, match="no tokenizer for text"):
        source.tokenised(lambda text: [], "nothing")
