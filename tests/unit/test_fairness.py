"""Tenants get their shares of a busy engine, whatever they send; an idle share is lost to nobody."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixlm.schedule.policy import WaitEstimate
from radixlm.wire.messages import Fault
from support.steps import VOCAB, Driver, continuation, make_driver


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(length)]


def served(driver: Driver, names: dict[int, str]) -> Counter[str]:
    """What each tenant got so far: prompt tokens computed, and twice the tokens generated."""
    got: Counter[str] = Counter()
    for spans in driver.spans:
        for uid, _, length in spans:
            got[names[uid]] += length
    for uid, tokens in driver.tokens.items():
        got[names[uid]] += len(tokens)
    return got


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
@pytest.mark.parametrize("weights", [{"a": 1.0, "b": 1.0}, {"a": 3.0, "b": 1.0}, {"a": 1.0, "b": 2.0, "c": 4.0}])
def test_busy_tenants_get_tokens_by_weight(weights: dict[str, float], policy: str) -> None:
    """One floods the queue first and with longer requests; it gains nothing by that."""
    rng = random.Random(1)
    driver = make_driver(fair=True, max_running=8, policy=policy)
    names: dict[int, str] = {}
    for tenant, share in weights.items():
        for _ in range(300):
            names[len(names)] = tenant
            length = 60 if tenant == "a" else 20
            driver.submit(len(names) - 1, prompt(rng, length), 12, tenant=tenant, share=share)
    while all(driver.scheduler.waiting.tenants[tenant] > 20 for tenant in weights):
        driver.step()
    got = served(driver, names)
    total, shares = got.total(), sum(weights.values())
    for tenant, share in weights.items():
        assert got[tenant] / total == pytest.approx(share / shares, abs=0.05), (tenant, got)


def test_a_latecomer_does_not_wait_for_a_flood() -> None:
    rng = random.Random(2)
    driver = make_driver(fair=True, max_running=4)
    for uid in range(200):
        driver.submit(uid, prompt(rng, 30), 10, tenant="flood")
    for _ in range(50):
        driver.step()
    driver.submit(1000, prompt(rng, 30), 10, tenant="other")
    waited = len(driver.plans)
    while 1000 not in driver.ends:
        driver.step()
    assert len(driver.plans) - waited < 40, "it waited for more than a few others"
    assert len(driver.scheduler.waiting) > 100


def test_nobody_saves_up_for_later() -> None:
    """A tenant that was away for long goes on beside the others; it does not shut them out."""
    rng = random.Random(3)
    driver = make_driver(fair=True, max_running=4)
    names = dict.fromkeys(range(400), "there") | dict.fromkeys(range(1000, 1200), "away")
    driver.submit(1000, prompt(rng, 30), 4, tenant="away")
    for uid in range(400):
        driver.submit(uid, prompt(rng, 30), 10, tenant="there")
    while len(driver.scheduler.waiting) > 200:
        driver.step()
    for uid in range(1001, 1200):
        driver.submit(uid, prompt(rng, 30), 10, tenant="away")
    before = served(driver, names)
    while driver.scheduler.waiting.tenants["away"] > 150:
        driver.step()
    gained = served(driver, names) - before
    assert gained["there"] / gained["away"] == pytest.approx(1.0, abs=0.25)


def test_without_shares_the_order_is_that_of_arrival() -> None:
    rng = random.Random(4)
    driver = make_driver(max_running=2)
    for uid in range(30):
        driver.submit(uid, prompt(rng, 10), 3, tenant="ab"[uid % 3 == 0])
    driver.run()
    started = sorted(driver.stats, key=lambda uid: (driver.stats[uid].started, uid))
    assert started == list(range(30))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.data())
def test_texts_do_not_depend_on_shares(data: st.DataObject) -> None:
    """Any mixture of tenants, weights and priorities, in a pool so small that sequences are paused."""
    driver = make_driver(pages=220, fair=True, max_running=4, preemption=data.draw(st.sampled_from([None, 1])))
    asked: dict[int, tuple[list[int], int]] = {}
    for uid in range(data.draw(st.integers(1, 16))):
        tokens = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=60))
        new = data.draw(st.integers(1, 40))
        asked[uid] = tokens, new
        more: dict[str, Any] = {"tenant": data.draw(st.sampled_from("abc")), "priority": data.draw(st.integers(0, 2))}
        driver.submit(uid, tokens, new, share=data.draw(st.sampled_from([0.5, 1.0, 4.0])), **more)
        for _ in range(data.draw(st.integers(0, 3))):
            driver.step()
    driver.run()
    for uid, (tokens, new) in asked.items():
        assert driver.tokens[uid] == continuation(tokens, new, frozenset({7}))
    driver.scheduler.cache.audit()
    assert not +driver.scheduler.waiting.tenants


# ---- a full queue


def test_a_full_queue_drops_the_newest_of_whoever_waits_with_most() -> None:
    rng = random.Random(5)
    driver = make_driver(fair=True, max_running=1, max_queued=8)
    driver.submit(99, prompt(rng, 10), 50, tenant="flood")
    driver.step()
    for uid in range(8):
        driver.submit(uid, prompt(rng, 10), tenant="flood")
    driver.submit(8, prompt(rng, 10), tenant="flood")
    assert _refused(driver) == {8}
    for uid in (100, 101, 102, 103):
        driver.submit(uid, prompt(rng, 10), tenant="small")
    assert _refused(driver) == {8, 7, 6, 5, 4}, "the newest of the flood made room"
    driver.submit(104, prompt(rng, 10), tenant="small")
    assert _refused(driver) == {8, 7, 6, 5, 4, 104}, "both wait with as many now"
    driver.submit(200, prompt(rng, 10), tenant="small", share=3.0)
    driver.run()
    assert all(isinstance(driver.ends[uid], Fault) == (uid in _refused(driver)) for uid in driver.ends)


def _refused(driver: Driver) -> set[int]:
    faults = {uid: end for uid, end in driver.ends.items() if isinstance(end, Fault)}
    assert all(fault.status == 429 and fault.retry_after >= 1.0 for fault in faults.values())
    return set(faults)


def test_the_wait_is_told_by_the_pace_of_those_before() -> None:
    rng = random.Random(6)
    driver = make_driver(max_running=1, max_queued=40)
    driver.tick = 1.0
    for uid in range(40):
        driver.submit(uid, prompt(rng, 10), 4)
    while len(driver.ends) < 20:
        driver.step()
    for uid in range(100, 130):
        driver.submit(uid, prompt(rng, 10), 4)
    (fault,) = [end for end in driver.ends.values() if isinstance(end, Fault)][:1]
    promised = fault.retry_after
    last, begin = max(uid for uid in range(100, 130) if uid not in driver.ends), driver.now
    driver.run()
    assert driver.stats[last].started - begin == pytest.approx(promised, rel=0.25)


def test_an_estimate_of_nothing_is_short_and_none_is_endless() -> None:
    waits = WaitEstimate()
    assert waits.seconds(1000) == waits.SHORTEST
    waits.entered(5.0)
    waits.entered(5.0)
    assert waits.seconds(1000) == waits.SHORTEST
    waits.entered(1e6)
    assert waits.seconds(1000) == waits.LONGEST
