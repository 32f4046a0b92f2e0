"""A day of requests on a simulated clock: everybody is served once, nobody waits long, nothing leaks, whatever the
policy.
"""

from __future__ import annotations

import pytest

from radixlm.runner.clock import CostModel
from radixlm.wire.messages import Finish
from support.simulation import Simulation, chats

#: A day of 100,000 requests, told in two hours on a device as slow as that makes it busy: batches are those of a busy
#: server.
DAY, SECONDS = 100_000, 7_200.0
SLOW = CostModel(base=0.06, per_token=0.0001)


def check(simulation: Simulation, count: int, seconds: float, longest_wait: float) -> None:
    record, scheduler = simulation.run(chats(count, seconds, seed=1))
    assert len(record.ends) == count, "not every request got its terminal message"
    assert all(isinstance(end, Finish) and end.kind in ("stop", "length") for end in record.ends.values())
    waits = [stats.started - stats.arrived for stats in record.stats.values()]
    assert max(waits) <= longest_wait, f"a request waited {max(waits):.1f} s"
    scheduler.cache.audit()
    counts = scheduler.cache.counts()
    assert counts["leased"] == counts["pinned"] == 0
    assert counts["free"] + counts["evictable"] == counts["total"]
    cached = sum(stats.cached_tokens for stats in record.stats.values())
    assert cached == scheduler.counters.cached_tokens
    assert cached > 0.3 * sum(stats.prompt_tokens for stats in record.stats.values())
    assert sum(record.counts.values()) == scheduler.counters.generation_tokens


def test_a_whole_day() -> None:
    check(Simulation(verify_every=400, cost=SLOW), DAY, SECONDS, longest_wait=30.0)


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight", "lof", "random"])
def test_no_policy_starves_anybody(policy: str) -> None:
    check(Simulation(policy=policy, rows=64, pages=30_000), 6_000, 400.0, longest_wait=45.0)


@pytest.mark.parametrize(("page_size", "depth"), [(16, 1), (64, 2)])
def test_tokens_are_the_same_with_any_page_size_and_depth(page_size: int, depth: int) -> None:
    count, seconds = 1_500, 100.0
    plain, _ = Simulation(pages=8_000, rows=48, verify_every=1).run(chats(count, seconds, seed=2))
    other = Simulation(
        pages=8_000 // page_size, page_size=page_size, rows=48, depth=depth, policy="lpm", verify_every=1
    )
    record, scheduler = other.run(chats(count, seconds, seed=2))
    assert record.texts == plain.texts
    assert len(record.ends) == count
    scheduler.cache.audit()
