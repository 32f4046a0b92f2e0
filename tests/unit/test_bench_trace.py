"""What is read out of a trace of a GPU: busy time, steps and the gaps between them."""

from __future__ import annotations

import random

import pytest

from radixlm.bench.trace import STEP_KERNELS, Kernel, Timeline


def step(launch: int, start: float, seconds: float) -> list[Kernel]:
    """A captured step of kernels that follow each other."""
    each = seconds / STEP_KERNELS
    return [Kernel("step", start + i * each, each, launch) for i in range(STEP_KERNELS)]


def test_busy_is_the_union_of_what_ran() -> None:
    rng = random.Random(0)
    spans = [(rng.randrange(1000), rng.randrange(1, 40)) for _ in range(60)]
    kernels = [Kernel("k", start, length, i) for i, (start, length) in enumerate(spans)]
    ticks = {tick for start, length in spans for tick in range(start, start + length)}
    timeline = Timeline(kernels)
    assert timeline.busy == len(ticks)
    assert timeline.seconds == max(ticks) + 1 - min(ticks)


def test_gaps_are_those_between_captured_steps() -> None:
    copy = Kernel("copy", 10.2, 0.1, 7)
    kernels = [*step(1, 0.0, 10.0), copy, *step(2, 10.5, 10.0), *step(3, 20.6, 10.0)]
    random.Random(1).shuffle(kernels)
    timeline = Timeline(kernels)
    assert timeline.steps() == [pytest.approx(span) for span in ((0.0, 10.0), (10.5, 20.5), (20.6, 30.6))]
    assert timeline.gaps() == [pytest.approx(0.5), pytest.approx(0.1)]


def test_a_step_that_was_not_captured_is_no_gap() -> None:
    prompt = [Kernel("prompt", 11.0 + i * 0.1, 0.1, 100 + i) for i in range(40)]
    timeline = Timeline([*step(1, 0.0, 10.0), *prompt, *step(2, 20.0, 10.0), *step(3, 31.0, 10.0)])
    assert timeline.gaps() == [pytest.approx(1.0)]


def test_an_empty_trace_has_nothing() -> None:
    timeline = Timeline([])
    assert (timeline.busy, timeline.seconds, timeline.steps(), timeline.gaps(), timeline.by_name()) == (
        0,
        0,
        [],
        [],
        [],
    )
