"""Plans as bytes: what a rank reads is what rank 0 planned, the same objects where they are the same objects."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest

from radixlm.base.plan import Join, Plan, SharedPrefix
from radixlm.base.request import LogprobParams
from radixlm.base.sampling import SamplingParams
from radixlm.wire.plans import Leave, PlanReader, PlanWriter, Sample
from support.steps import make_driver


def same(a: Any, b: Any) -> bool:
    """Equal through and through, types of arrays included."""
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if dataclasses.is_dataclass(a) and not isinstance(a, type):
        names = [field.name for field in dataclasses.fields(a)]
        return type(a) is type(b) and all(same(getattr(a, name), getattr(b, name)) for name in names)
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def full() -> Plan:
    """A plan with everything in it."""
    ints = np.arange(5, dtype=np.int32)
    sampling = SamplingParams(temperature=0.5, seed=-(2**63), logit_bias=((3, -1.5),), stop_token_ids=(7, 8))
    scores = LogprobParams(top=3, prompt_from=0, token_ids=(1, 2))
    return Plan(
        step=2**40, rows=ints, starts=ints + 1, lengths=ints + 2, samples=ints > 2,
        joins=(Join(3, 2**53, ints + 3, ints[:0], 4, sampling, scores), Join(0, 1, ints, ints, 5, SamplingParams())),
        page_rows=ints, page_index=ints + 4, page_ids=ints + 5, shared=(SharedPrefix(ints[:2], 64),),
        token_rows=ints, token_positions=ints + 6, token_ids=ints + 7, wants_history=True,
    )  # fmt: skip


def test_everything_in_a_plan_arrives() -> None:
    plan = full()
    for field in dataclasses.fields(Plan):  # so that this test knows of every field there is
        value = getattr(plan, field.name)
        assert len(value) if isinstance(value, (tuple, np.ndarray)) else value, f"{field.name} is empty in this test"
    read = PlanReader().read(PlanWriter().plan(plan))
    assert same(plan, read)


def test_a_days_plans_arrive_with_their_identities() -> None:
    """The real planner's plans: equal, and an array is the last plan's object exactly where it was when planned."""
    driver = make_driver(pages=4000, max_running=8)
    rng = random.Random(0)
    for uid in range(40):
        stem = list(range(30))[: rng.choice([0, 30])]
        driver.submit(uid, stem + [rng.randrange(1000) for _ in range(rng.randrange(1, 90))], new=rng.randrange(1, 40))
    driver.run()
    writer, reader = PlanWriter(), PlanReader()
    last: tuple[Plan, Plan] | None = None
    kept = sizes = 0
    for plan in driver.plans:
        frame = writer.plan(plan)
        read = reader.read(frame)
        assert same(plan, read) and isinstance(read, Plan)
        if last is not None:
            for name in ("rows", "lengths", "samples", "shared", "page_ids"):
                was = getattr(plan, name) is getattr(last[0], name)
                assert was == (getattr(read, name) is getattr(last[1], name)), name
            if plan.rows is last[0].rows:
                kept += 1
                sizes = max(sizes, len(frame) if not len(plan.page_ids) else 0)
        last = plan, read
    assert kept > 20 and sizes < 200, "a steady step of eight rows is no more than a line of text"


def test_masks_and_the_end() -> None:
    writer, reader = PlanWriter(), PlanReader()
    masks = {3: np.arange(4, dtype=np.int32), 0: np.array([-1], np.int32)}
    read = reader.read(writer.sample(masks))
    assert isinstance(read, Sample) and read.masks.keys() == masks.keys()
    assert all(same(masks[span], read.masks[span]) for span in masks)
    for nothing in (None, {}):
        read = reader.read(writer.sample(nothing))
        assert isinstance(read, Sample) and not read.masks
    assert isinstance(reader.read(writer.leave()), Leave)


@pytest.mark.parametrize("frame", [b"", b"X", b"P", b"P\x81\xa4step\xc0", b"S\x93", b"P\x81\xa4rows\x92\xa2|O\xc4\x00"])
def test_other_frames_are_refused(frame: bytes) -> None:
    with pytest.raises(ValueError):
        PlanReader().read(frame)


def test_arrays_that_have_no_place_in_a_plan_are_not_sent() -> None:
    strange = dataclasses.replace(full(), rows=np.array([None, 1], object))
    with pytest.raises(TypeError, match="no place"):
        PlanWriter().plan(strange)
