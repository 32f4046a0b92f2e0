"""The null runner: valid plans give texts that scheduling cannot change; wrong plans are found out."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixlm.base.plan import Join, Plan
from radixlm.base.request import LogprobParams
from radixlm.base.sampling import SamplingParams
from radixlm.runner.clock import CostModel, VirtualClock
from radixlm.runner.mirror import PlanError
from radixlm.runner.null import NullRunner
from support.crowd import Crowd, Job, make_facts

VOCAB, EOS, CONTEXT = 97, 5, 200


def make_runner(rows: int = 8, pages: int = 400, page_size: int = 4, **more: Any) -> NullRunner:
    facts = make_facts(vocab=VOCAB, rows=rows, pages=pages, page_size=page_size, context=CONTEXT, eos=(EOS,))
    return NullRunner(facts, **more)


def make_jobs(seed: int, count: int = 30) -> list[Job]:
    rng = random.Random(seed)
    stems = [[rng.randrange(VOCAB) for _ in range(40)] for _ in range(3)]
    jobs = []
    for uid in range(count):
        prompt = rng.choice(stems)[: rng.randrange(41)] + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))]
        sampling = SamplingParams(
            max_new_tokens=rng.choice([0, 1, 7, 30]), temperature=rng.choice([0.0, 1.0]), seed=rng.randrange(5)
        )
        jobs.append(Job(uid, prompt, sampling))
    return jobs


def solo(job: Job) -> list[int]:
    """The job's text when nobody else is there, computed in one chunk and single steps."""
    alone = Job(0, job.prompt, job.sampling, job.logprobs)
    Crowd(make_runner(1, 300, 1), rows=1, pages=300, page_size=1, chunk=CONTEXT, depth=1, seed=0, calm=True).run(
        [alone]
    )
    return alone.output


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    page_size=st.sampled_from([1, 4, 16]),
    chunk=st.sampled_from([1, 5, 64]),
    depth=st.sampled_from([1, 2, 3]),
    verify_every=st.sampled_from([1, 7]),
)
def test_texts_do_not_depend_on_scheduling(
    seed: int, page_size: int, chunk: int, depth: int, verify_every: int
) -> None:
    jobs = make_jobs(seed)
    runner = make_runner(8, 1600 // page_size, page_size, verify_every=verify_every)
    Crowd(runner, rows=8, pages=1600 // page_size, page_size=page_size, chunk=chunk, depth=depth, seed=seed).run(jobs)
    for job in jobs:
        assert job.failed is None
        assert len(job.output) == job.sampling.max_new_tokens
        assert job.output == solo(job)


def test_seeds_and_prompts_make_different_texts() -> None:
    def text(prompt: list[int], **sampling: Any) -> tuple[int, ...]:
        return tuple(solo(Job(0, prompt, SamplingParams(max_new_tokens=12, **sampling))))

    texts = {
        text([1, 2], temperature=0.0),
        text([2, 1], temperature=0.0),
        text([1, 2, 0], temperature=0.0),
        text([1, 2], seed=1),
        text([1, 2], seed=2),
    }
    assert len(texts) == 5
    assert text([1, 2], temperature=0.0, seed=7) in texts


def test_texts_end_as_often_as_asked_and_never_too_early() -> None:
    jobs = [
        Job(uid, [uid % VOCAB, uid // VOCAB], SamplingParams(max_new_tokens=100, min_new_tokens=20, temperature=0.0))
        for uid in range(100)
    ]
    Crowd(
        make_runner(100, 12_000, 1, end_probability=0.1),
        rows=100,
        pages=12_000,
        page_size=1,
        chunk=9,
        depth=1,
        seed=1,
        calm=True,
    ).run(jobs)
    ends = [token == EOS for job in jobs for token in job.output[20:]]
    assert not any(EOS in job.output[:20] for job in jobs)
    assert 0.08 < sum(ends) / len(ends) < 0.12


def test_log_probabilities_do_not_depend_on_scheduling_either() -> None:
    asked = LogprobParams(top=3, prompt_from=0, token_ids=(1, 2))
    answers = []
    for chunk, seed in ((3, 1), (50, 2)):
        jobs = [Job(uid, [7] * uid + [uid], SamplingParams(max_new_tokens=4), asked) for uid in range(6)]
        Crowd(make_runner(), rows=8, pages=400, page_size=4, chunk=chunk, depth=2, seed=seed).run(jobs)
        parts: list[dict[int, tuple[Any, ...]]] = []
        for job in jobs:
            by_position: dict[int, tuple[Any, ...]] = {}
            for part in (*job.prompt_scores, *job.scores):
                rows = zip(
                    part.chosen.tolist(), part.top_ids.tolist(), part.top.tolist(), part.picked.tolist(), strict=True
                )
                by_position.update(enumerate(rows, part.position))
            assert sorted(by_position) == list(range(1, len(job.prompt) + 4))
            assert all(
                chosen < 0 and len(top) == 3 and len(picked) == 2 for chosen, _, top, picked in by_position.values()
            )
            parts.append(by_position)
        answers.append(parts)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_vectors_depend_on_the_prompt_alone(kind: Any) -> None:
    def vector(cuts: list[int]) -> Any:
        runner = make_runner(page_size=1)
        joining = Join(0, 1, np.arange(9, dtype=np.int32), np.zeros(0, np.int32), 9, SamplingParams(), None, kind)
        start, total = 0, np.zeros(0)
        for cut in cuts:
            pages = [(0, i, i) for i in range(start, start + cut)]
            made = plan(start, [(0, start, cut)], [] if start else [joining], pages, samples=False)
            part = step(runner, made).wait().vectors[0]
            total = total + part if start else part
            start += cut
        return total

    whole = vector([9])
    assert np.array_equal(whole, vector([4, 4, 1])) and np.abs(whole).sum() > 0


def test_failures_happen_where_they_are_told_to() -> None:
    runner = make_runner(fails=lambda uid, position: "broken" if (uid, position) == (1, 6) else None)
    jobs = [Job(uid, [uid, 4, 4], SamplingParams(max_new_tokens=8)) for uid in range(3)]
    Crowd(runner, rows=8, pages=400, page_size=4, chunk=4, depth=2, seed=3).run(jobs)
    assert [job.failed for job in jobs] == [None, "broken", None]
    assert [len(job.output) for job in jobs] == [8, 3, 8]


# ---- time


def test_the_clock_follows_the_cost_of_steps() -> None:
    clock = VirtualClock(100.0)
    runner = make_runner(page_size=1, clock=clock, cost=CostModel(base=1.0, per_token=0.1, per_context_token=0.01))
    first = step(runner, plan(0, [(0, 0, 5)], joins=[join(0, 5)], pages=[(0, i, i) for i in range(5)]))
    second = step(runner, plan(1, [(0, 5, 1)], pages=[(0, 5, 5)]))
    assert clock() == 100.0  # queueing takes no time
    first.wait()
    assert clock() == pytest.approx(100.0 + 1.0 + 0.5 + 0.05)
    clock.advance(0.2)  # the host is busy while the device goes on
    second.wait()
    assert clock() == pytest.approx(101.55 + 1.0 + 0.1 + 0.06)


# ---- wrong plans


def join(row: int, count: int, pages: tuple[int, ...] = (), uid: int = 0, first: int = 0) -> Join:
    tokens = np.arange(first, first + count, dtype=np.int32)
    return Join(row, uid, tokens, np.array(pages, np.int32), count, SamplingParams(temperature=0.0))


def plan(
    step: int,
    spans: list[tuple[int, int, int]],
    joins: list[Join] | None = None,
    pages: list[tuple[int, int, int]] | None = None,
    samples: bool = True,
) -> Plan:
    writes = np.array(pages or [], np.int32).reshape(-1, 3)
    rows, starts, lengths = np.array(spans, np.int32).reshape(-1, 3).T
    everybody = np.full(len(rows), samples)
    return Plan(step, rows, starts, lengths, everybody, tuple(joins or ()), writes[:, 0], writes[:, 1], writes[:, 2])


def step(runner: NullRunner, plan: Plan) -> Any:
    pending = runner.forward(plan)
    runner.sample(pending)
    return pending


def started() -> NullRunner:
    """Row 0 has eight tokens computed in pages 10 and 11, its ninth is known; page size 4."""
    runner = make_runner()
    step(runner, plan(0, [(0, 0, 8)], [join(0, 8)], [(0, 0, 10), (0, 1, 11), (0, 2, 12)]))
    return runner


def test_the_right_plan_passes() -> None:
    step(started(), plan(1, [(0, 8, 1)]))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (plan(1, [(0, 9, 1)]), "row 0: a span starts at 9, not where the last one ended"),
        (plan(1, [(0, 7, 2)]), "row 0: a span starts at 7, not where the last one ended"),
        (plan(1, [(0, 8, 2)]), "row 0: a span ends at 10, beyond the known tokens"),
        (plan(1, [(0, 8, 0)], samples=False), "row 0: an empty span at 8"),
        (plan(1, [(0, 8, 1), (0, 9, 1)]), "row 0 has two spans in one step"),
        (plan(1, [(1, 0, 4)], [join(1, 8)], [(1, 0, 20)]), "row 1: position 4 is sampled, but is known"),
        (plan(1, [(1, 4, 4)], [join(1, 8)], [(1, 1, 20)]), "row 1: positions before 4 were never computed"),
        (
            plan(1, [(1, 4, 4)], [join(1, 8, (20,))], [(1, 1, 21)]),
            "row 1 reads position 0, but its page holds something else",
        ),
        (
            plan(1, [(1, 4, 4)], [join(1, 8, (11,))], [(1, 1, 21)]),
            "row 1 reads position 0, but its page holds something else",
        ),
        (plan(1, [(1, 0, 8)], [join(1, 8)], [(1, 0, 20)]), "row 1 has no page for position 4"),
        (
            plan(1, [(1, 0, 8)], [join(1, 8)], [(1, 0, 20), (1, 1, 20)]),
            "position 0 of row 1 has the same place as another",
        ),
        (plan(1, [(1, 0, 8)], [join(1, 8)], [(1, 0, 400)]), "a page write names a page outside 0 .. 399"),
        (plan(1, [(1, 4, 4)], [join(1, 8, (-1,))]), "join of 0 in row 1 names a page outside 0 .. 399"),
        (plan(1, [(8, 0, 8)], [join(8, 8)]), "join of 0 in row 8: there is no such row"),
        (plan(1, [(1, 0, 1)], [join(1, CONTEXT + 1)]), "join of 0 in row 1: 201 tokens"),
        (plan(1, [(0, 8, 1)], pages=[(0, 1, 30)]), "row 0 reads position 4, but its page holds something else"),
    ],
)
def test_wrong_plans_are_found_out(wrong: Plan, message: str) -> None:
    with pytest.raises(PlanError, match=f"^{message}"):
        step(started(), wrong)


def test_a_shared_prefix_is_no_mistake_and_its_end_is_found() -> None:
    runner = started()
    step(runner, plan(1, [(1, 4, 4)], [join(1, 8, (10,))], [(1, 1, 21)]))  # the same first four tokens
    step(runner, plan(2, [(0, 8, 1), (1, 8, 1)], pages=[(1, 2, 22)]))
    # Row 2 gets page 10 while rows 0 and 1 still read it.
    step(runner, plan(3, [(2, 0, 4)], [join(2, 4, first=50)], [(2, 0, 10)]))
    with pytest.raises(PlanError, match="row 1 reads position 0"):
        step(runner, plan(4, [(1, 9, 1)]))


def test_sparse_verification_still_finds_a_lost_page() -> None:
    runner = make_runner(verify_every=8)
    step(runner, plan(0, [(0, 0, 8)], [join(0, 8)], [(0, i, 10 + i) for i in range(10)]))
    step(runner, plan(1, [(1, 0, 4)], [join(1, 4, first=50)], [(1, 0, 10)]))
    for i in range(5):
        step(runner, plan(2 + i, [(0, 8 + i, 1)]))
    with pytest.raises(PlanError, match="row 0 reads position 0"):
        step(runner, plan(7, [(0, 13, 1)]))


def test_a_page_replaced_by_an_equal_one_is_read_from_there() -> None:
    runner = started()
    # Row 1 computes the same tokens in pages of its own, then is told to use those of row 0.
    step(runner, plan(1, [(1, 0, 8)], [join(1, 8)], [(1, 0, 20), (1, 1, 21), (1, 2, 22)]))
    step(runner, plan(2, [(1, 8, 1)], pages=[(1, 0, 10), (1, 1, 11)]))
    step(runner, plan(3, [(2, 0, 8)], [join(2, 8, first=50)], [(2, 0, 20), (2, 1, 21)]))
    step(runner, plan(4, [(1, 9, 1), (0, 8, 1)]))


def test_no_torch_is_imported() -> None:
    code = "import sys, radixlm.runner.null; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
