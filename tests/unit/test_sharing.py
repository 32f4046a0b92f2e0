"""Which rows read a prefix together: groups really share it, save what they can, cost nothing where there are none."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixlm.base.plan import Outcome, Plan, SharedPrefix
from radixlm.cache.ports import Lease
from radixlm.schedule.planner import StepLimits
from radixlm.schedule.sharing import LEAST_LENGTH, Sharing, shared_prefixes
from support.steps import Driver, RecomputingRunner, SamplingParams, continuation, make_driver


def lease(pages: list[int], page_size: int, published: int | None = None) -> Lease:
    """A lease on these pages, of which so many are published (all)."""
    return Lease("", pages, (len(pages) if published is None else published) * page_size, None)


def forest(rng: random.Random, rows: int, page_size: int, longest: int = 40) -> list[Lease]:
    """Leases that continue beginnings of earlier ones with pages of their own, some of which are not published."""
    leases: list[Lease] = []
    fresh = 0
    for _ in range(rows):
        begin: list[int] = []
        if leases and rng.random() < 0.85:
            other = rng.choice(leases)
            published = other.published // page_size
            cuts = published, rng.randint(0, published), rng.randint(0, published) // 8 * 8
            begin = other.pages[: rng.choice(cuts)]
        own = rng.randrange(longest)
        pages = begin + list(range(fresh, fresh + own))
        fresh += own
        leases.append(lease(pages, page_size, rng.randint(len(begin), len(pages))))
    return leases


def batch(rows: int, groups: int, prefix: int, own: int, page_size: int = 1) -> list[Lease]:
    """Rows of some groups in turn; those of a group share a prefix."""
    prefixes = [[group * prefix + i for i in range(prefix)] for group in range(groups)]
    first = groups * prefix
    return [
        lease(prefixes[row % groups] + list(range(first + row * own, first + (row + 1) * own)), page_size)
        for row in range(rows)
    ]


def saving(groups: tuple[SharedPrefix, ...]) -> int:
    """Tokens not read."""
    return sum((len(group.spans) - 1) * group.length for group in groups)


def paths(leases: list[Lease], page_size: int) -> list[tuple[int, ...]]:
    return [tuple(lease.pages[: lease.published // page_size]) for lease in leases]


def simple(leases: list[Lease], page_size: int, least: int) -> int:
    """What is saved by one group for all that share the least length, over what they all share."""
    by_prefix: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for path in paths(leases, page_size):
        if len(path) >= least:
            by_prefix.setdefault(path[:least], []).append(path)
    total = 0
    for group in by_prefix.values():
        common = min(
            (next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))))
            for a, b in pairwise([*group, group[0]])
        )
        total += (len(group) - 1) * common
    return total * page_size


def optimum(leases: list[Lease], page_size: int, least: int) -> int:
    """The most that can be saved: for each node of the trie, with a group there or not, under each group above it."""
    rows = paths(leases, page_size)

    @cache
    def best(node: tuple[int, ...], above: int) -> int:
        depth = len(node)
        here = [row for row in rows if row[:depth] == node]
        if len(here) == 1:
            return above
        ending = sum(len(row) == depth for row in here)
        children = {row[: depth + 1] for row in here if len(row) > depth}
        without = above * ending + sum(best(child, above) for child in children)
        if depth < max(least, 1):
            return without
        return max(without, depth * ending - depth + sum(best(child, depth) for child in children))

    return best((), 0) * page_size if rows else 0


@given(st.integers(0, 2**32), st.integers(1, 12), st.sampled_from([1, 4]), st.integers(0, 6))
def test_groups_share_what_they_say_and_save_more_than_one_level_does(
    seed: int, rows: int, page_size: int, least: int
) -> None:
    leases = forest(random.Random(seed), rows, page_size)
    groups = shared_prefixes(leases, page_size, least * page_size, 0)
    for group in groups:
        pages = group.length // page_size
        assert group.length % page_size == 0 and pages >= max(least, 1)
        assert len(group.spans) >= 2
        sharers = [leases[span] for span in group.spans.tolist()]
        assert all(other.pages[:pages] == sharers[0].pages[:pages] for other in sharers)
        assert all(other.published >= group.length for other in sharers)
    members = [span for group in groups for span in group.spans.tolist()]
    assert len(members) == len(set(members))
    assert simple(leases, page_size, max(least, 1)) <= saving(groups) <= optimum(leases, page_size, least)


def test_close_to_the_best_there_is() -> None:
    rng = random.Random(5)
    forests = [forest(rng, rng.randint(2, 14), 1) for _ in range(300)]
    best = sum(optimum(leases, 1, 1) for leases in forests)
    assert sum(saving(shared_prefixes(leases, 1, 1, 0)) for leases in forests) > 0.97 * best > 0


def test_nested_prefixes_are_cut_where_it_saves_most() -> None:
    def named(leases: list[Lease]) -> dict[tuple[int, ...], int]:
        return {tuple(group.spans.tolist()): group.length for group in shared_prefixes(leases, 1, 1, 0)}

    trunk = list(range(1000))
    # Two pairs far down: each for itself (2 * 1900) rather than all four at the trunk (3 * 1000).
    ends = [[*trunk, *range(a, a + 900), b] for a, b in ((2000, 1), (2000, 2), (3000, 3), (3000, 4))]
    assert named([lease(pages, 1) for pages in ends]) == {(0, 1): 1900, (2, 3): 1900}
    # Two pairs a little below the trunk: all four together (3 * 1000) rather than 2 * 1010.
    ends = [[*trunk, *range(a, a + 10), b] for a, b in ((2000, 1), (2000, 2), (3000, 3), (3000, 4))]
    assert named([lease(pages, 1) for pages in ends]) == {(0, 1, 2, 3): 1000}
    # The pair keeps what it has if nobody is left to share the trunk with.
    assert named([lease(pages, 1) for pages in ends[:2]] + [lease(trunk[:500], 1)]) == {(0, 1): 1010}


def test_thresholds() -> None:
    assert saving(shared_prefixes(batch(16, 1, LEAST_LENGTH - 1, 10), 1, least_saving=0)) == 0
    assert saving(shared_prefixes(batch(17, 1, LEAST_LENGTH, 10), 1)) == 16 * LEAST_LENGTH
    assert saving(shared_prefixes(batch(16, 1, LEAST_LENGTH, 10), 1)) == 0  # 15 * 256 tokens do not pay
    assert saving(shared_prefixes(batch(16, 1, LEAST_LENGTH, 10), 1, least_saving=15 * LEAST_LENGTH)) > 0
    assert shared_prefixes([], 1) == ()


def test_only_what_is_published_is_shared() -> None:
    pages = list(range(20))
    leases = [lease(pages, 16, 20), lease(pages, 16, 17), lease(pages, 16, 15)]
    (group,) = shared_prefixes(leases, 16, least_saving=0)
    assert group.spans.tolist() == [0, 1] and group.length == 17 * 16


def test_the_same_batch_gets_the_same_object() -> None:
    leases = batch(32, 2, 512, 5)
    sharing = Sharing(1, True)
    first = sharing.groups(leases)
    assert len(first) == 2 and sharing.groups(list(leases)) is first
    other = sharing.groups(leases[1:])
    assert other is not first and saving(other) == saving(first) - 512
    leases[0].published -= 5
    assert sharing.groups(leases) is not first
    assert Sharing(1, False).groups(leases) == ()


def cpu_seconds(call: Callable[[], object], enough: float) -> float:
    """Of the calling thread, the best of some tries: what it would take on a core of its own. As long as the best is
    not `enough`, somebody may be busy beside us: then it is tried for some seconds more.
    """
    best, tries, until = 1.0, 0, time.monotonic() + 5.0
    while tries < 40 or (best >= enough and time.monotonic() < until):
        start = time.thread_time()
        call()
        best = min(best, time.thread_time() - start)
        tries += 1
    return best


@pytest.mark.parametrize("groups", [1, 16, 64, 128])
def test_grouping_256_rows_takes_less_than_a_millisecond(groups: int) -> None:
    leases = batch(256, groups, 2048, 128)
    assert saving(shared_prefixes(leases, 1)) == (256 - groups) * 2048
    assert cpu_seconds(lambda: shared_prefixes(leases, 1), 1e-3) < 1e-3


def test_a_batch_that_shares_nothing_costs_next_to_nothing() -> None:
    leases = batch(256, 256, 2048, 128)
    sharing = Sharing(1, True)
    assert cpu_seconds(lambda: shared_prefixes(leases, 1), 2e-4) < 2e-4
    assert cpu_seconds(lambda: sharing.groups(leases), 1e-4) < 1e-4  # the batch has not changed


class CheckingRunner(RecomputingRunner):
    """Holds what plans say of shared prefixes against its own page table."""

    shared_steps = 0
    mixed_steps = 0

    def run(self, plan: Plan, masks: Mapping[int, np.ndarray] | None = None) -> Outcome:
        outcome = super().run(plan, masks)
        self.shared_steps += bool(plan.shared)
        self.mixed_steps += bool(plan.shared) and not plan.decode
        seen: set[int] = set()
        for group in plan.shared:
            spans = group.spans.tolist()
            assert max(spans) < plan.decodes
            assert not seen.intersection(spans)
            seen.update(spans)
            pages = self._pages[plan.rows[spans], : group.length // self._page_size]
            assert (pages >= 0).all() and (pages == pages[0]).all()
            assert group.length <= plan.starts[spans].min()
        return outcome


def checked(driver: Driver) -> CheckingRunner:
    settings, cache = driver.scheduler.settings, driver.scheduler.cache
    runner = CheckingRunner(settings.max_running, settings.context_length, cache.pages, cache.page_size)
    driver._runner = runner
    return runner


@pytest.mark.parametrize(("page_size", "depth"), [(1, 2), (16, 1), (16, 2)])
def test_plans_of_a_busy_scheduler_name_pages_that_are_shared(page_size: int, depth: int) -> None:
    driver = make_driver(
        20_000 // page_size, page_size, depth, max_running=24, shared_prefix=True, step=StepLimits(2048, 512)
    )
    runner = checked(driver)
    rng = random.Random(page_size + depth)
    stems = [[rng.randrange(8, 1000) for _ in range(700)] for _ in range(3)]
    asked: dict[int, tuple[list[int], int]] = {}
    while len(asked) < 60 or not driver.scheduler.idle:
        # Now and then nobody comes for a while: then all that are there decode.
        if len(asked) < 60 and (driver.scheduler.idle or rng.random() < 0.1):
            for _ in range(rng.randint(1, 20)):
                stem = rng.choice(stems)[: rng.choice((700, 700, 400, 100))]
                asked[len(asked)] = ([*stem, *rng.choices(range(8, 1000), k=rng.randint(1, 20))], rng.randint(1, 60))
                driver.submit(len(asked) - 1, *asked[len(asked) - 1])
        driver.step()
    assert all(driver.tokens[uid] == continuation(tokens, new, frozenset({7})) for uid, (tokens, new) in asked.items())
    assert runner.shared_steps > 20
    assert runner.mixed_steps > 5


def test_a_steady_batch_hands_out_the_same_groups() -> None:
    driver = make_driver(shared_prefix=True, step=StepLimits(4096, 4096), depth=2)
    runner = checked(driver)
    for uid in range(12):
        tokens = [*range(8, 608), 700 + uid]
        driver.submit(uid, tokens, sampling=SamplingParams(max_new_tokens=30, ignore_eos=True))
    driver.run()
    shared = [plan.shared for plan in driver.plans if plan.shared]
    assert runner.shared_steps == len(shared)
    # The first one came a step before the others, and leaves before them.
    everybody = [groups for groups in shared if np.array_equal(groups[0].spans, range(12))]
    assert len(everybody) > 20 and len({id(groups) for groups in everybody}) == 1
    assert everybody[0][0].length == 600


def test_nothing_is_named_unless_it_is_asked_for() -> None:
    driver = make_driver(step=StepLimits(4096, 4096))
    for uid in range(12):
        driver.submit(uid, [*range(8, 608), 700 + uid], 10)
    driver.run()
    assert not any(plan.shared for plan in driver.plans)
