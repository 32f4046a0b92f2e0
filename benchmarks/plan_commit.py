"""What the scheduler costs: seconds of `plan` and `commit` a step in steady decode, no device and no model.

python benchmarks/plan_commit.py --rows 256 --steps 900
"""

from __future__ import annotations

import argparse
import random
import time

from radixlm.base.plan import Outcome
from radixlm.base.request import Request
from radixlm.base.sampling import SamplingParams
from radixlm.cache.manager import RadixManager
from radixlm.schedule.planner import StepLimits
from radixlm.schedule.scheduler import Scheduler, Settings


def measure(rows: int, steps: int, page_size: int) -> tuple[float, float]:
    """Mean seconds of a plan and of a commit over the steps in which every row decodes."""
    settings = Settings(
        context_length=8192,
        eos_ids=frozenset(),
        max_running=rows,
        max_queued=rows,
        step=StepLimits(8192, 8192),
    )
    scheduler = Scheduler(RadixManager(rows * 2048 // page_size, page_size), settings)
    rng = random.Random(1)
    sampling = SamplingParams(max_new_tokens=steps + 100, temperature=0.0)
    for uid in range(rows):
        tokens = tuple(rng.randrange(1000) for _ in range(200))
        scheduler.submit(Request(uid=uid, rid=str(uid), tokens=tokens, sampling=sampling, arrival=float(uid)))
    planning = committing = 0.0
    counted = 0
    now = 1.0  # 0 would mean "has not happened yet" in a sequence's times
    while counted < steps:
        started = time.perf_counter()
        plan = scheduler.plan(now)
        planned = time.perf_counter()
        assert plan is not None
        outcome = Outcome(plan.step, [5] * int(plan.samples.sum()))
        sampled = time.perf_counter()
        scheduler.commit(plan, outcome, now)
        scheduler.take_messages()
        if plan.decode and len(plan.rows) == rows:
            planning += planned - started
            committing += time.perf_counter() - sampled
            counted += 1
    return planning / counted, committing / counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=900)
    said = parser.parse_args()
    for page_size in (1, 16):
        plan, commit = measure(said.rows, said.steps, page_size)
        print(f"page size {page_size}: plan {plan * 1e3:.3f} ms, commit {commit * 1e3:.3f} ms, {said.rows} rows")


if __name__ == "__main__":
    main()
