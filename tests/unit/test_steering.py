"""Guides steer their sequences and nobody else, whatever the depth, the pauses and the length of jumps.

The guides here are scripts: places where a token is fixed, and places where some are allowed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixlm.base.errors import BadRequest
from radixlm.base.request import Grammar, LogprobParams, Request
from radixlm.base.sampling import SamplingParams
from radixlm.schedule.planner import StepLimits
from support.steps import VOCAB, Driver, continuation, make_driver

#: A place of a script: the one token that may stand there, or the range of those that may.
Place = int | tuple[int, int]


def words(low: int, high: int) -> np.ndarray:
    bits = np.zeros(-(-VOCAB // 32) * 32, np.uint8)
    bits[low:high] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


class Script:
    """A guide. It checks every token it is told."""

    def __init__(self, places: Sequence[Place], fails_at: int = -1) -> None:
        self.places = places
        self.taken: list[int] = []
        self.fails_at = fails_at
        self.masks = 0

    @property
    def done(self) -> bool:
        return len(self.taken) == len(self.places)

    @property
    def slack(self) -> int:
        return 0

    def take(self, token: int) -> None:
        place = self.places[len(self.taken)]
        low, high = (place, place + 1) if isinstance(place, int) else place
        assert low <= token < high
        self.taken.append(token)

    def forced(self) -> list[int]:
        found: list[int] = []
        for place in self.places[len(self.taken) :]:
            if not isinstance(place, int):
                break
            found.append(place)
        return found

    def mask(self) -> np.ndarray:
        self.masks += 1
        if self.fails_at == len(self.taken):
            raise BadRequest("the script is too complex", code="too_complex")
        place = self.places[len(self.taken)]
        return words(place, place + 1) if isinstance(place, int) else words(*place)


@dataclass
class Late:
    """A ticket that is ready when it has been asked so often."""

    made: Script | None
    asked: int = 0
    after: int = 0
    error: Exception | None = None

    def guide(self) -> Script | None:
        self.asked += 1
        if self.asked <= self.after:
            return None
        if self.error is not None:
            raise self.error
        return self.made


class Desk:
    """Makes tickets from scripts by uid, and remembers the guides."""

    def __init__(self, scripts: dict[int, Sequence[Place]], **more: Any) -> None:
        self.scripts = scripts
        self.guides: dict[int, Script] = {}
        self.tickets: dict[int, Late] = {}
        self.more = more

    def __call__(self, request: Request) -> Late | None:
        if request.uid not in self.scripts:
            return None
        self.guides[request.uid] = Script(self.scripts[request.uid])
        self.tickets[request.uid] = Late(self.guides[request.uid], **self.more)
        return self.tickets[request.uid]


GRAMMAR = Grammar(kind="regex", text="x", param="regex")


def submit(driver: Driver, uid: int, prompt: list[int], new: int = 64, **more: Any) -> None:
    driver.submit(uid, prompt, new, grammar=GRAMMAR, **more)


places = st.one_of(
    st.integers(10, VOCAB - 1), st.tuples(st.integers(10, 500), st.integers(1, 400)).map(lambda p: (p[0], p[0] + p[1]))
)
scripts = st.lists(places, min_size=1, max_size=24)


def answers(prompts: list[list[int]], desk: Desk, **how: Any) -> Driver:
    driver = make_driver(make_ticket=desk, **how)
    for uid, prompt in enumerate(prompts):
        submit(driver, uid, prompt, 12) if uid in desk.scripts else driver.submit(uid, prompt, 12)
        driver.step()
    driver.run()
    driver.scheduler.cache.audit()
    assert driver.scheduler.cache.counts()["leased"] == 0
    return driver


@given(st.lists(scripts, min_size=1, max_size=5), st.integers(0, 1000))
@settings(max_examples=40)
def test_a_text_does_not_depend_on_how_it_was_computed(found: list[list[Place]], seed: int) -> None:
    rng = random.Random(seed)
    prompts = [[rng.randrange(10, VOCAB) for _ in range(rng.randrange(1, 40))] for _ in range(len(found) + 2)]
    reference: dict[int, list[int]] | None = None
    for how in (
        {"jump_forward": 0},
        {"jump_forward": 1},
        {"jump_forward": 3},
        {"jump_forward": 0, "depth": 2},
        {"jump_forward": 1, "depth": 2},
        {"jump_forward": 2, "depth": 3, "page_size": 4},
        {"jump_forward": 1, "step": StepLimits(tokens=8, chunk=3)},
        {"jump_forward": 1, "depth": 2, "pages": 90, "max_running": 3},
        {"jump_forward": 1, "pages": 70},
    ):
        desk = Desk(dict(enumerate(found)))
        driver = answers(prompts, desk, **how)
        for uid, script in enumerate(found):
            assert len(driver.tokens[uid]) == min(len(script), 12)
            assert driver.ends[uid].kind == ("stop" if len(script) <= 12 else "length")
            assert driver.tokens[uid] == desk.guides[uid].taken
        for uid in range(len(found), len(prompts)):
            assert driver.tokens[uid] == continuation(prompts[uid], 12, frozenset({7}))
        if reference is not None:
            assert driver.tokens == reference
        reference = driver.tokens


def test_forced_tokens_save_steps() -> None:
    script: list[Place] = [11, 12, 13, (20, 900), 14, 15, 16, 17, (20, 900), 18]
    steps = {}
    for depth in (1, 2):
        for jump in (0, 1):
            driver = make_driver(make_ticket=Desk({0: script}), jump_forward=jump, depth=depth)
            submit(driver, 0, [1, 2, 3])
            driver.run()
            steps[depth, jump] = len(driver.plans)
            gained = jump and (8 if depth == 1 else 7)  # a lone token is sampled by the step that is under way
            assert driver.stats[0].jump_forward_tokens == gained
            assert driver.stats[0].completion_tokens == len(script)
            assert driver.scheduler.counters.jump_forward_tokens == gained
    assert steps[1, 1] == 2  # one for each token with a choice
    assert steps[1, 0] == len(script)
    assert steps[2, 1] == 5  # besides those two: the dropped samples, and the lone token at the end


def test_a_text_that_is_forced_whole_is_never_computed() -> None:
    driver = make_driver(make_ticket=Desk({0: [11, 12, 13]}), jump_forward=1)
    submit(driver, 0, [1, 2, 3])
    driver.run()
    assert not driver.plans
    assert driver.tokens[0] == [11, 12, 13] and driver.ends[0].kind == "stop"


def test_scored_tokens_are_computed() -> None:
    driver = make_driver(make_ticket=Desk({0: [11, 12, 13]}), jump_forward=1)
    submit(driver, 0, [1, 2, 3], logprobs=LogprobParams(top=1))
    driver.run()
    assert len(driver.plans) == 3 and driver.tokens[0] == [11, 12, 13]
    assert driver.stats[0].jump_forward_tokens == 0


@pytest.mark.parametrize("jump", [0, 1])
@pytest.mark.parametrize("depth", [1, 2])
def test_stop_ids_and_limits_hold_for_forced_tokens(jump: int, depth: int) -> None:
    script: list[Place] = [11, (20, 900), 12, 13, 14, 15]
    driver = make_driver(make_ticket=Desk({0: script, 1: script}), jump_forward=jump, depth=depth)
    stopping = SamplingParams(max_new_tokens=64, temperature=0.0, stop_token_ids=(13,))
    submit(driver, 0, [1, 2, 3], sampling=stopping)
    submit(driver, 1, [4, 2, 3], new=4)
    driver.run()
    assert driver.tokens[0][2:] == [12, 13] and driver.ends[0].matched == 13
    assert len(driver.tokens[1]) == 4 and driver.ends[1].kind == "length"


def test_a_guide_in_the_making_holds_its_sequence_alone() -> None:
    driver = make_driver(make_ticket=Desk({0: [(20, 900)] * 4}, after=50))
    submit(driver, 0, [1, 2, 3])
    driver.submit(1, [4, 5, 6])
    for _ in range(30):
        driver.step()
    assert driver.ends.keys() == {1}
    driver.run()
    assert len(driver.tokens[0]) == 4


def test_a_guide_that_cannot_be_made_is_the_clients_error() -> None:
    refusal = BadRequest("unbalanced", code="invalid_grammar")
    driver = make_driver(make_ticket=Desk({0: [11]}, after=3, error=refusal))
    submit(driver, 0, [1, 2, 3])
    driver.submit(1, [4, 5, 6])
    driver.run()
    fault = driver.ends[0]
    assert (fault.status, fault.code, fault.message, fault.param) == (400, "invalid_grammar", "unbalanced", "regex")
    assert driver.tokens[1] == continuation([4, 5, 6], 8, frozenset({7}))


@pytest.mark.parametrize("depth", [1, 2])
def test_a_guide_that_fails_on_its_way_ends_its_sequence(depth: int) -> None:
    desk = Desk({0: [(20, 900)] * 8})
    driver = make_driver(make_ticket=desk, depth=depth)
    submit(driver, 0, [1, 2, 3])
    desk.guides[0].fails_at = 3
    driver.submit(1, [4, 5, 6])
    driver.run()
    assert driver.ends[0].code == "too_complex" and len(driver.tokens[0]) == 3
    assert driver.tokens[1] == continuation([4, 5, 6], 8, frozenset({7}))
    assert driver.scheduler.cache.counts()["leased"] == 0


def test_cancelling_while_the_guide_is_made() -> None:
    driver = make_driver(make_ticket=Desk({0: [11]}, after=10**9))
    submit(driver, 0, [1, 2, 3])
    driver.step()
    driver.scheduler.cancel(0, "gone", driver.now)
    driver.run()
    assert driver.scheduler.idle


def test_plans_without_guides_wait_for_nothing() -> None:
    driver = make_driver(make_ticket=Desk({}), depth=2)
    driver.submit(0, [1, 2, 3])
    driver.run()
    assert not any(plan.wants_history for plan in driver.plans)


def test_an_engine_without_guides_refuses_grammars() -> None:
    driver = make_driver()
    submit(driver, 0, [1, 2, 3])
    assert driver.ends[0].status == 501
