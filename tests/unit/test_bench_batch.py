"""One-batch and offline benchmarks: their plans, floors and sums, without a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixlm.base.errors import BadRequest, Internal
from radixlm.base.facts import DeviceFacts, EngineFacts, ModelFacts, PoolFacts
from radixlm.base.plan import Plan
from radixlm.bench import floors
from radixlm.bench.batch import Shape, decode_plans, prefill_plans, run_batch
from radixlm.bench.datasets import Session, Turn
from radixlm.bench.offline import pass_over
from radixlm.bench.one_batch import measure
from radixlm.runner.null import NullRunner

MODEL = ModelFacts(
    name="tiny", path="", architecture="llama", dtype="float32", parameters=1000, layers=2, hidden_size=8,
    vocab_size=50, sampled_vocab_size=50, eos_ids=(2,), bos_id=None, context_length=512, kv_bytes_per_token=64,
    weight_bytes=4000,
)  # fmt: skip


def facts(pages: int = 1000, page_size: int = 1, max_running: int = 16) -> EngineFacts:
    device = DeviceFacts(kind="cpu", name="test", memory_total=0, memory_free=0, cores=1)
    pool = PoolFacts(pages=pages, page_size=page_size, max_running=max_running, bytes=0)
    return EngineFacts(model=MODEL, device=device, pool=pool, decisions={}, timings={})


def spans(plan: Plan) -> Iterator[tuple[int, int, int, bool]]:
    yield from zip(plan.rows.tolist(), plan.starts.tolist(), plan.lengths.tolist(), plan.samples.tolist(), strict=True)


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 70), st.integers(1, 9), st.integers(1, 100), st.sampled_from([1, 4, 16]))
def test_every_token_is_computed_once_and_in_its_own_page(
    batch: int, input_len: int, output_len: int, budget: int, page_size: int
) -> None:
    shape, engine = Shape(batch, input_len, output_len), facts(page_size=page_size)
    shape.check(engine)
    prefill = list(prefill_plans(shape, engine, budget, seed=3))
    decode = list(decode_plans(shape, len(prefill)))
    assert [plan.step for plan in (*prefill, *decode)] == list(range(len(prefill) + len(decode)))
    computed = dict.fromkeys(range(batch), 0)
    sampled = dict.fromkeys(range(batch), 0)
    pages: dict[tuple[int, int], int] = {}
    for plan in (*prefill, *decode):
        pages |= dict(
            zip(
                zip(plan.page_rows.tolist(), plan.page_index.tolist(), strict=True), plan.page_ids.tolist(), strict=True
            )
        )
        assert plan in decode or int(plan.lengths.sum()) <= budget
        joined = {join.row for join in plan.joins}
        for row, start, length, samples in spans(plan):
            assert start == computed[row] and (start > 0 or row in joined) and length > 0
            computed[row] += length
            assert all((row, position // page_size) in pages for position in range(start, start + length))
            assert samples == (computed[row] == input_len + sampled[row])  # the last known token
            sampled[row] += samples
    assert set(sampled.values()) == {output_len}
    assert len(set(pages.values())) == len(pages) and max(pages.values()) < engine.pool.pages
    assert all(int(plan.lengths.sum()) == budget for plan in prefill[:-1])


def test_prompts_are_in_the_vocabulary_and_seeded() -> None:
    def prompts(seed: int) -> list[list[int]]:
        plans = prefill_plans(Shape(2, 30, 1), facts(), 1000, seed)
        return [join.tokens.tolist() for plan in plans for join in plan.joins]

    assert prompts(1) == prompts(1) != prompts(2)
    assert max(max(prompt) for prompt in prompts(1)) < 50


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (Shape(0, 5, 5), "--batch-size is 0"),
        (Shape(1, 500, 50), "more than the context of 512"),
        (Shape(17, 5, 5), "more than the 16 rows"),
        (Shape(16, 60, 5), "do not fit into the pool of 1000"),
    ],
)
def test_batches_that_do_not_fit(shape: Shape, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        shape.check(facts())


def step(starts: list[int], lengths: list[int], samples: list[bool]) -> Plan:
    rows = np.arange(len(starts), dtype=np.int32)
    return Plan(0, rows, np.array(starts, np.int32), np.array(lengths, np.int32), np.array(samples))


def test_work_of_a_step() -> None:
    head, layers = 50 * 8, 1000 - 50 * 8
    decode = floors.work(MODEL, step([10, 20], [1, 1], [True, True]))
    assert decode.bytes == 4000 + 64 * 30
    assert decode.flops == 2 * layers * 2 + 2 * head * 2 + 4 * 2 * 8 * (11 + 21)
    prefill = floors.work(MODEL, step([0, 0], [4, 1], [False, True]))
    assert prefill.flops == 2 * layers * 5 + 2 * head + 4 * 2 * 8 * (1 + 2 + 3 + 4 + 1)
    assert decode.seconds(floors.Ceilings(bandwidth=592, flops=1e12)) == 10
    assert prefill.seconds(floors.Ceilings(bandwidth=1e12, flops=prefill.flops)) == 1


def test_ceilings_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from radixlm.device.select import choose, open_device

    monkeypatch.setattr(floors, "SECONDS", 0.01)
    monkeypatch.setattr(floors, "SIDE", 128)
    ceilings = floors.measure_ceilings(open_device(choose("cpu")), torch.float32, 0)
    assert 0 < ceilings.bandwidth < 1e13 and 0 < ceilings.flops < 1e15


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(1, 60), st.integers(1, 9), st.integers(1, 90), st.sampled_from([1, 4, 16]))
def test_a_runner_accepts_the_plans(batch: int, input_len: int, output_len: int, budget: int, page_size: int) -> None:
    """The null runner checks every page a plan reads; batches follow each other in the same rows and pages."""
    runner = NullRunner(facts(page_size=page_size))
    shape = Shape(batch, input_len, output_len)
    for seed in range(2):
        prefill, decode = run_batch(runner, shape, budget, seed)
        assert len(prefill) == -(-batch * input_len // budget) and len(decode) == output_len - 1


def test_repeats_and_floors_of_a_batch() -> None:
    runner = NullRunner(facts())
    ceilings = floors.Ceilings(bandwidth=1e6, flops=1e12)
    result = measure(runner, Shape(2, 10, 4), budget=15, repeats=3, seed=0, ceilings=ceilings)
    assert result.decode is not None and (result.prefill.count, result.decode.count) == (3, 9)
    assert result.prefill_floor == pytest.approx((2 * 4000 + 64 * 5) / 1e6)
    assert result.decode_floor == pytest.approx((4000 + 64 * 2 * 11) / 1e6)
    assert result.prefill_rate == pytest.approx(20 / result.prefill.median)
    assert measure(runner, Shape(1, 3, 1), budget=8, repeats=1, seed=0).decode is None


def test_a_failed_step_is_an_error() -> None:
    runner = NullRunner(facts(), fails=lambda uid, position: "no memory" if position == 6 else None)
    with pytest.raises(BadRequest, match="a step failed: no memory"):
        run_batch(runner, Shape(1, 5, 3), budget=8, seed=0)


# ---- offline


class Echo:
    """Answers each prompt with its last token, over and over; remembers what it was asked."""

    def __init__(self, short: int = 0) -> None:
        self.asked: list[Any] = []
        self._short = short

    def generate(self, prompt: Any, sampling_params: Any, *, input_ids: Any) -> list[dict[str, Any]]:
        self.asked.append(prompt or input_ids)
        answers = []
        for said, params in zip(prompt or input_ids, sampling_params, strict=True):
            assert params["ignore_eos"] and params["temperature"] == 0.0
            count = params["max_new_tokens"] - self._short
            meta = {"prompt_tokens": len(said), "completion_tokens": count, "cached_tokens": len(said) // 2}
            answers.append({"text": "", "output_ids": [said[-1]] * count, "meta_info": meta})
        return answers

    def flush_cache(self) -> None:
        pass


def test_turns_are_run_together_with_the_answers_in_their_prompts() -> None:
    engine = Echo()
    sessions = [
        Session((Turn(2, ids=(1, 2)), Turn(1, ids=(3,)))),
        Session((Turn(1, ids=(7,)),)),
    ]
    measured = pass_over(engine, sessions)
    assert engine.asked == [[[1, 2], [7]], [[1, 2, 2, 2, 3]]]
    assert (measured.requests, measured.input_tokens, measured.output_tokens) == (3, 8, 4)
    assert measured.cached_tokens == 1 + 0 + 2 and measured.hit_rate == pytest.approx(3 / 8)


def test_text_prompts_and_short_answers() -> None:
    engine = Echo()
    assert pass_over(engine, [Session((Turn(1, text="abc"),))]).output_tokens == 1
    assert engine.asked == [["abc"]]
    with pytest.raises(Internal, match="has 1 tokens, 2 were asked for"):
        pass_over(Echo(short=1), [Session((Turn(2, ids=(1,)),))])


def test_numbers_of_plans_are_int32() -> None:
    for plan in prefill_plans(Shape(3, 9, 2), facts(), 8, 0):
        arrays = (plan.rows, plan.starts, plan.lengths, plan.page_rows, plan.page_index, plan.page_ids)
        assert all(array.dtype == np.int32 for array in arrays) and plan.samples.dtype == np.bool_
