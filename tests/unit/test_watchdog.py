"""The watchdog ends a process whose step hangs, and no other: each case is a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from radixlm.engine.watchdog import STUCK_STATUS

TESTS = Path(__file__).parents[1]

#: A loop with a watchdog of 0.2 s, told to drain while its first request is still running.
LOOP = """
import sys, time
sys.path.insert(0, {tests!r})
from radixlm.base.request import Request
from radixlm.base.sampling import SamplingParams
from radixlm.cache.manager import RadixManager
from radixlm.engine.loop import EngineLoop
from radixlm.engine.watchdog import Watchdog
from radixlm.runner.null import NullRunner
from radixlm.schedule.planner import StepLimits
from radixlm.schedule.scheduler import Scheduler, Settings
from radixlm.wire.messages import Drain, Submit
from support.simulation import facts

class Inbox:
    sampling = SamplingParams(max_new_tokens=4)
    messages = [Submit(Request(uid=0, rid="a", tokens=(5, 6, 7), sampling=sampling, arrival=0.0)), Drain(60.0)]
    def receive(self, timeout):
        taken, self.messages = self.messages, []
        return taken

class Outbox:
    def send(self, message):
        print(type(message).__name__)

class Stuck(NullRunner):
    def forward(self, plan):
        time.sleep({stuck})
        return super().forward(plan)

step = StepLimits(tokens=64, chunk=64)
settings = Settings(context_length=64, eos_ids=frozenset(), max_running=4, max_queued=4, step=step)
scheduler = Scheduler(RadixManager(64, 1), settings)
EngineLoop(scheduler, Stuck(facts(64)), Inbox(), Outbox(), Outbox(), 1, Watchdog(0.2)).run()
time.sleep({after})
print("alive")
"""


def run(stuck: float, after: float) -> subprocess.CompletedProcess[str]:
    script = LOOP.format(tests=str(TESTS), stuck=stuck, after=after)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)


def test_a_loop_that_has_ended_is_not_watched() -> None:
    """An engine that is closed in the middle of its work must not end its program minutes later."""
    done = run(stuck=0.0, after=0.8)
    assert (done.returncode, done.stdout.split()[-2:]) == (0, ["Goodbye", "alive"]), done.stderr


def test_a_step_that_hangs_ends_the_process_with_its_stacks() -> None:
    done = run(stuck=30.0, after=0.0)
    assert done.returncode == STUCK_STATUS, done.stderr
    assert "in forward" in done.stderr
    assert "over 0.2 s" in done.stderr
