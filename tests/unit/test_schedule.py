"""The scheduler over a runner that recomputes everything: same tokens whatever happens, bounded waits, exact ends."""

from __future__ import annotations

import random
from typing import Any

import pytest

from radixlm.cache.nocache import NoCache
from radixlm.wire.messages import Fault, Finish
from support.steps import Driver, SamplingParams, StepLimits, continuation, make_driver

EOS = frozenset({7})


def prompt(length: int, seed: int = 0) -> list[int]:
    return [random.Random(f"{seed}/{i}").randrange(8, 1000) for i in range(length)]


def storm(driver: Driver, seed: int, requests: int = 120, cancel: float = 0.04) -> dict[int, tuple[list[int], int]]:
    """Requests with shared prefixes arrive and are cancelled at random; returns what was asked."""
    rng = random.Random(seed)
    stems = [prompt(100, stem) for stem in range(4)]
    asked: dict[int, tuple[list[int], int]] = {}
    while len(asked) < requests or not driver.scheduler.idle:
        while len(asked) < requests and rng.random() < 0.5:
            tokens = rng.choice(stems)[: rng.randrange(101)] + prompt(rng.randrange(1, 60), rng.randrange(10**6))
            asked[len(asked)] = (tokens, rng.randrange(0, 80))
            driver.submit(len(asked) - 1, tokens, asked[len(asked) - 1][1])
        if asked and rng.random() < cancel:
            driver.scheduler.cancel(rng.randrange(len(asked)), "test", driver.now)
        driver.step()
        if rng.random() < 0.05:
            driver.scheduler.cache.audit()
    driver.scheduler.cache.audit()
    return asked


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "dfs-weight", "lof", "random"])
@pytest.mark.parametrize(("pages", "page_size", "depth"), [(6000, 1, 1), (700, 1, 2), (50, 16, 2), (40, 16, 1)])
def test_tokens_do_not_depend_on_scheduling(policy: str, pages: int, page_size: int, depth: int) -> None:
    driver = make_driver(pages, page_size, depth, policy=policy, lpm_max_wait=1.0)
    asked = storm(driver, seed=pages)
    assert driver.ends.keys() == asked.keys()
    whole = 0
    for uid, (tokens, new) in asked.items():
        expected = continuation(tokens, new, EOS)
        end = driver.ends[uid]
        if isinstance(end, Finish) and end.kind != "abort":
            whole += 1
            assert driver.tokens[uid] == expected
            assert end == (Finish("stop", 7) if expected and expected[-1] == 7 else Finish("length"))
        else:
            assert driver.tokens[uid] == expected[: len(driver.tokens[uid])]
    assert whole > 60
    counts = driver.scheduler.cache.counts()
    assert counts["leased"] == counts["pinned"] == 0
    assert counts["free"] + counts["evictable"] == counts["total"]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("new", [0, 1])
def test_a_row_is_handed_on_without_the_page_writes_of_its_last_sequence(new: int, depth: int) -> None:
    """Sequences that end with the step that computes their prompt: where one finds its prefix published by another, its
    table is told to follow, and by then the row may be somebody else's.
    """
    driver = make_driver(depth=depth, max_running=4)
    rng = random.Random(new)
    stem = prompt(20)
    for uid in range(200):
        driver.submit(uid, stem[: rng.randrange(1, 20)] + prompt(rng.randrange(1, 3), uid % 5), new)
        if rng.random() < 0.3:
            driver.step()
    driver.run()
    driver.scheduler.cache.audit()


def test_without_a_tree_nothing_is_reused_and_nothing_leaks() -> None:
    driver = make_driver(cache=NoCache(700, 1), depth=2)
    asked = storm(driver, seed=3)
    assert driver.scheduler.counters.cached_tokens == 0
    assert driver.scheduler.cache.counts()["free"] == 700
    assert all(
        driver.tokens[uid] == continuation(tokens, new, EOS)
        for uid, (tokens, new) in asked.items()
        if driver.ends[uid] != Finish("abort", None, "test")
    )


def test_memory_pressure_pauses_and_resumes() -> None:
    """Sixteen sequences that together need four times the pool: all finish with the text they have alone."""
    driver = make_driver(pages=1000, conservativeness=0.1)
    for uid in range(16):
        driver.submit(uid, prompt(30, uid), 200, sampling=SamplingParams(max_new_tokens=200, ignore_eos=True))
    driver.run()
    assert driver.scheduler.counters.retractions > 0
    for uid in range(16):
        assert driver.tokens[uid] == continuation(prompt(30, uid), 200)
        assert driver.ends[uid] == Finish("length")


def test_admission_does_not_overfill_when_lengths_are_used_up() -> None:
    """With the default estimate, a load that uses up its `max_new_tokens` is paused a few times at most."""
    driver = make_driver(pages=4000, max_running=64)
    for uid in range(200):
        driver.submit(uid, prompt(64, uid), 64, sampling=SamplingParams(max_new_tokens=64, ignore_eos=True))
    driver.run()
    assert driver.scheduler.counters.retractions <= 4


@pytest.mark.parametrize("page_size", [1, 16])
def test_identical_prompts_compute_their_prefix_once(page_size: int) -> None:
    driver = make_driver(pages=60_000 // page_size, page_size=page_size, max_running=64, step=StepLimits(512, 512))
    common = prompt(320)
    for uid in range(64):
        driver.submit(uid, [*common, 500 + uid], 2)
    driver.run()
    computed = sum(length for spans in driver.spans for _, start, length in spans if start < len(common))
    assert computed <= len(common) + 64 * page_size
    assert sum(stats.cached_tokens for stats in driver.stats.values()) == 63 * 320


def test_cached_tokens_are_what_was_skipped() -> None:
    driver = make_driver(page_size=16, pages=1000)
    for uid, tokens in enumerate((prompt(100), prompt(100)[:50] + prompt(50, 1), prompt(100))):
        driver.submit(uid, tokens, 4)
        driver.run()
        spans = [(start, length) for spans in driver.spans for u, start, length in spans if u == uid]
        assert spans[0][0] == driver.stats[uid].cached_tokens
    # The third: the whole prompt and the three computed answers of the first are there, but never the last token.
    assert [driver.stats[uid].cached_tokens for uid in range(3)] == [0, 48, 96]


def test_a_long_prompt_is_cut_and_running_streams_wait_for_one_chunk_at_most() -> None:
    driver = make_driver(step=StepLimits(tokens=64, chunk=32))
    driver.submit(0, prompt(10), 40, sampling=SamplingParams(max_new_tokens=40, ignore_eos=True))
    driver.step()
    driver.submit(1, prompt(1000, 1), 4)
    while 0 not in driver.ends:
        driver.step()
        assert any(uid == 0 for uid, _, _ in driver.spans[-1]), "the running stream was left out of a step"
        assert sum(length for uid, _, length in driver.spans[-1] if uid == 1) <= 32
    driver.run()
    assert driver.tokens[1] == continuation(prompt(1000, 1), 4, EOS)


def test_endless_arrivals_do_not_starve_decode_nor_the_other_way_round() -> None:
    driver = make_driver(step=StepLimits(tokens=16, chunk=16), max_running=24)
    for uid in range(20):
        driver.submit(uid, prompt(40, uid), 50, sampling=SamplingParams(max_new_tokens=50, ignore_eos=True))
    for _ in range(60):
        driver.step()
        decoding = {uid for uid in driver.tokens if driver.tokens[uid] and uid not in driver.ends}
        later = {uid for uid, _, _ in driver.spans[-1]}
        assert decoding <= later | {uid for uid in driver.tokens if len(driver.tokens[uid]) == 1}
    driver.run()
    assert all(len(tokens) == 50 for tokens in driver.tokens.values())


def test_lpm_takes_the_longest_prefix_first_and_ages() -> None:
    def order(max_wait: float) -> list[int]:
        driver = make_driver(policy="lpm", lpm_max_wait=max_wait, max_running=1, step=StepLimits(512, 512))
        driver.submit(0, prompt(64), 1)
        driver.run()
        driver.submit(1, prompt(64, 9), 1)  # cold, first to arrive
        for uid, shared in ((2, 20), (3, 60), (4, 40)):
            driver.now += 0.001
            driver.submit(uid, prompt(64)[:shared] + prompt(10, uid), 1)
        driver.now += 1.0
        driver.run()
        return list(driver.ends)[1:]

    assert order(max_wait=100.0) == [3, 4, 2, 1]
    assert order(max_wait=0.5) == [1, 2, 3, 4]


def test_dfs_weight_uses_up_a_branch_before_the_next() -> None:
    driver = make_driver(policy="dfs-weight", lpm_max_wait=100.0, step=StepLimits(512, 512))
    for uid, stem in ((0, 0), (1, 1)):
        driver.submit(uid, prompt(64, stem), 1)
    driver.run()
    before = len(driver.plans)
    for uid, stem in ((2, 0), (3, 1), (4, 0), (5, 1), (6, 1)):
        driver.submit(uid, prompt(48, stem) + prompt(8, 100 + uid), 1)
    driver.run()
    assert [join.uid for plan in driver.plans[before:] for join in plan.joins] == [3, 5, 6, 2, 4]


def test_lof_takes_the_longest_output_first() -> None:
    driver = make_driver(policy="lof", max_running=1, lpm_max_wait=100.0)
    for uid, new in enumerate((5, 9, 2, 7)):
        driver.submit(uid, prompt(8, uid), new, sampling=SamplingParams(max_new_tokens=new, ignore_eos=True))
    driver.run()
    assert list(driver.ends) == [1, 3, 0, 2]


def test_priority_goes_first_and_preempts() -> None:
    driver = make_driver(pages=700, max_running=2, preemption=10)
    for uid in range(3):
        driver.submit(uid, prompt(50, uid), 100, sampling=SamplingParams(max_new_tokens=100, ignore_eos=True))
    for _ in range(5):
        driver.step()
    driver.submit(9, prompt(50, 9), 5, priority=20)
    driver.step()
    assert any(uid == 9 for uid, _, _ in driver.spans[-1]), "the urgent request was not admitted within a step"
    driver.run()
    assert next(iter(driver.ends)) == 9
    for uid in range(3):
        assert driver.tokens[uid] == continuation(prompt(50, uid), 100)


@pytest.mark.parametrize("depth", [1, 2])
def test_cancel_frees_everything_within_a_step(depth: int) -> None:
    driver = make_driver(pages=500, depth=depth)
    for uid in range(4):
        driver.submit(uid, prompt(90, uid), 50)
    for _ in range(4):
        driver.step()
    for uid in range(4):
        driver.scheduler.cancel(uid, "gone", driver.now)
        driver.scheduler.cancel(uid, "gone", driver.now)
    produced = {uid: len(tokens) for uid, tokens in driver.tokens.items()}
    while not driver.scheduler.idle:
        driver.step()
    assert {uid: len(tokens) for uid, tokens in driver.tokens.items()} == produced
    counts = driver.scheduler.cache.counts()
    assert counts["leased"] == counts["pinned"] == 0
    driver.scheduler.cache.audit()


@pytest.mark.parametrize(
    ("tokens", "changes", "status"),
    [
        ([], {}, 400),
        (prompt(3000), {}, 400),
        (prompt(300), {"pages": 200}, 400),
        ([1], {"max_queued": 0}, 429),
    ],
)
def test_what_can_never_run_is_refused_on_arrival(tokens: list[int], changes: dict[str, Any], status: int) -> None:
    driver = make_driver(**changes)
    driver.submit(0, tokens)
    end = driver.ends[0]
    assert isinstance(end, Fault) and end.status == status
    assert driver.scheduler.idle


def test_a_prompt_that_nearly_fills_the_pool_ends_with_length() -> None:
    driver = make_driver(pages=200)
    driver.submit(0, prompt(192), 64, sampling=SamplingParams(max_new_tokens=64, ignore_eos=True))
    driver.run()
    assert driver.ends[0] == Finish("length")
    assert len(driver.tokens[0]) == 9
    assert driver.scheduler.cache.counts()["leased"] == 0


def test_no_new_tokens_computes_the_prompt_only() -> None:
    driver = make_driver()
    driver.submit(0, prompt(100), 0)
    driver.run()
    assert driver.ends[0] == Finish("length") and driver.tokens[0] == []
    driver.submit(1, [*prompt(100), 5], 1)
    driver.run()
    assert driver.stats[1].cached_tokens == 100


def test_namespaces_do_not_share() -> None:
    driver = make_driver()
    for uid, namespace in enumerate(("a", "b", "a")):
        driver.submit(uid, prompt(50), 2, namespace=namespace)
        driver.run()
    assert [driver.stats[uid].cached_tokens for uid in range(3)] == [0, 0, 49]


def test_time_limits_end_requests_with_504() -> None:
    driver = make_driver(queue_timeout=1.0, request_timeout=5.0, max_running=1, pages=5000)
    driver.submit(0, prompt(8), 2000, sampling=SamplingParams(max_new_tokens=2000, ignore_eos=True))
    driver.submit(1, prompt(8, 1), 4)
    driver.tick = 0.05
    driver.run()
    first, second = driver.ends[0], driver.ends[1]
    assert isinstance(first, Fault) and first.status == 504 and len(driver.tokens[0]) > 50
    assert isinstance(second, Fault) and second.status == 504 and not driver.tokens[1]


def test_a_stop_from_outside_drops_what_is_in_flight() -> None:
    driver = make_driver(depth=2)
    driver.submit(0, prompt(20), 50, sampling=SamplingParams(max_new_tokens=50, ignore_eos=True))
    for _ in range(6):
        driver.step()
    seen = len(driver.tokens[0])
    driver.scheduler.stop(0, driver.now)
    driver.run()
    assert driver.ends[0] == Finish("stop") and len(driver.tokens[0]) == seen
