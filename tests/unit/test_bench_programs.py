"""`radixlm bench programs`: the workloads on a scheduler and a cache that are real, and a device that is not."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest

from radixlm.base.errors import StartupError
from radixlm.bench.programs.main import main, run
from radixlm.bench.programs.record import Call, Record
from radixlm.bench.programs.table import VARIANTS, WORKLOADS
from radixlm.bench.programs.workload import Size, Words, Workload
from radixlm.config.resolve import override
from radixlm.config.schema import Config

SMALL = Size(0.25)


def made() -> list[Workload]:
    return [make(Words(number), SMALL) for number, make in enumerate(WORKLOADS.values())]


def test_workloads_are_functions_of_their_seed() -> None:
    first, again = made(), made()
    assert [workload.items for workload in first] == [workload.items for workload in again]
    other = [make(Words(99), SMALL) for make in WORKLOADS.values()]
    assert all(a.items != b.items for a, b in zip(first, other, strict=True))
    assert [workload.name for workload in first] == list(WORKLOADS)
    bigger = [make(Words(0), Size(1)) for make in WORKLOADS.values()]
    assert all(len(b.items) > len(a.items) for a, b in zip(first, bigger, strict=True))


def test_hit_rates_are_near_the_optimum_and_texts_the_same() -> None:
    config = override(Config(), {"device": "null", "max_total_tokens": 100_000})
    workloads = made()
    results, _ = run(config, workloads, list(VARIANTS))
    found = {(result.workload, result.variant): result for result in results}
    assert len(found) == len(WORKLOADS) * len(VARIANTS)
    for workload in workloads:
        full = found[workload.name, "full"]
        for name in VARIANTS:
            result = found[workload.name, name]
            assert result.texts == full.texts and result.calls == full.calls, (workload.name, name)
            assert result.prompt_tokens == full.prompt_tokens and result.output_tokens == full.output_tokens
            assert result.hit_rate <= result.optimal + 1e-9
        assert found[workload.name, "no-cache"].hit_rate == 0
    for name in ("full", "fcfs"):
        fractions = [found[workload.name, name].fraction for workload in workloads]
        assert statistics.fmean(fractions) > 0.96 and min(fractions) > 0.9, dict(zip(WORKLOADS, fractions, strict=True))
    rate = {name: statistics.fmean(found[w.name, name].hit_rate for w in workloads) for name in VARIANTS}
    assert rate["no-tree"] < rate["full"] - 0.1


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def brute(calls: Sequence[Call]) -> float:
    """The optimum, prefix by prefix."""
    known: list[tuple[int, ...]] = []
    computed = asked = 0
    for call in sorted(calls, key=lambda call: call.started):
        if call.hint:
            continue
        common = max((common_length(call.prompt, text) for text in known), default=0)
        computed += len(call.prompt) - min(common, call.limit)
        asked += len(call.prompt)
        known.append(call.prompt + call.output[:-1])
    return 1 - computed / asked


@pytest.mark.parametrize("seed", range(10))
def test_the_optimum_is_that_of_a_cache_that_never_forgets(seed: int) -> None:
    rng = random.Random(seed)
    calls = []
    for _ in range(40):
        prompt = tuple(rng.randrange(2) for _ in range(rng.randrange(1, 12)))
        output = tuple(rng.randrange(2) for _ in range(rng.randrange(4)))
        limit = rng.choice([len(prompt) - 1, 0])
        calls.append(Call(prompt, output, 0, limit, "", rng.random() < 0.1, rng.random(), 0.0))
    record = Record(calls)
    assert record.optimum() == pytest.approx(brute(calls))
    assert record.computed == sum(len(call.prompt) for call in calls)


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result, picture = tmp_path / "result.json", tmp_path / "plot.svg"
    arguments = ["--device", "null", "--max-total-tokens", "50000", "--scale", "0.2", "--workloads", "judge,rag"]
    assert main([*arguments, "--variants", "full,no-cache", "--save-result", str(result), "--plot", str(picture)]) == 0
    said = capsys.readouterr().out
    assert "judge:" in said and "mean of 2 workloads" in said and "of optimum" in said
    content = json.loads(result.read_text())
    assert [(one["workload"], one["variant"]) for one in content["results"]] == [
        ("judge", "full"), ("judge", "no-cache"), ("rag", "full"), ("rag", "no-cache")
    ]  # fmt: skip
    assert content["engine"]["device"]["kind"] == "null" and content["seed"] == 0
    assert picture.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workloads", "jugde"], "there is no 'jugde'; did you mean judge?"),
        (["--variants", ","], "--variants names nothing"),
        (["--scale", "0"], "--scale is 0; it must be above 0"),
        (["--plot", "x.txt"], "the name must end in"),
    ],
)
def test_wrong_options(arguments: list[str], message: str) -> None:
    with pytest.raises(StartupError, match=message.replace("?", r"\?")):
        main(["--device", "null", *arguments])
