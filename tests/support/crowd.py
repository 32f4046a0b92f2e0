"""Valid plans made at random: sequences that join, share prefixes, advance, pause and leave as the dice fall."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from radixlm.base.facts import DeviceFacts, EngineFacts, ModelFacts, PoolFacts
from radixlm.base.plan import Join, Outcome, Plan, TokenScores
from radixlm.base.request import LogprobParams
from radixlm.base.sampling import SamplingParams


def make_facts(
    *, vocab: int, rows: int, pages: int, page_size: int, context: int, eos: tuple[int, ...] = (), padded: int = 0
) -> EngineFacts:
    """Facts of a model that has `padded` ids more than it may sample."""
    return EngineFacts(
        model=ModelFacts(
            name="tiny", path="", architecture="Tiny", dtype="float32", parameters=0, layers=2, hidden_size=32,
            vocab_size=vocab + padded, sampled_vocab_size=vocab, eos_ids=eos, bos_id=None, context_length=context,
            kv_bytes_per_token=0, weight_bytes=0,
        ),
        device=DeviceFacts(kind="cpu", name="", memory_total=0, memory_free=0, cores=1),
        pool=PoolFacts(pages=pages, page_size=page_size, max_running=rows, bytes=0),
        decisions={},
        timings={},
    )  # fmt: skip


@dataclass
class Job:
    """A sequence: what is wanted, where it is, what came of it."""

    uid: int
    prompt: list[int]
    sampling: SamplingParams
    logprobs: LogprobParams | None = None
    output: list[int] = field(default_factory=list)
    scores: list[TokenScores] = field(default_factory=list)
    prompt_scores: list[TokenScores] = field(default_factory=list)
    failed: str | None = None
    row: int = -1
    pages: list[int] = field(default_factory=list)
    promised: int = 0
    dispatched: int = 0
    in_flight: int = 0

    @property
    def known(self) -> list[int]:
        return self.prompt + self.output

    @property
    def pending(self) -> int:
        return len(self.prompt) + len(self.output) + self.promised - self.dispatched

    @property
    def wants_more(self) -> bool:
        return len(self.output) + self.promised < self.sampling.max_new_tokens

    @property
    def done(self) -> bool:
        finished = len(self.output) >= self.sampling.max_new_tokens and self.pending <= bool(self.output)
        return self.in_flight == 0 and (self.failed is not None or finished)


class Crowd:
    """Runs jobs through a runner with valid plans that nobody would make on purpose.

    Args:
        chunk: longest span. depth: steps in flight. calm: nobody pauses, and everybody who can advance does.
    """

    def __init__(
        self,
        runner: Any,
        *,
        rows: int,
        pages: int,
        page_size: int,
        chunk: int,
        depth: int,
        seed: int,
        calm: bool = False,
    ) -> None:
        self._runner = runner
        self._rng = random.Random(seed)
        self._page_size = page_size
        self._chunk = chunk
        self._depth = depth
        self._calm = calm
        self._free_rows = list(range(rows))
        self._free_pages = list(range(pages))
        self._holders: Counter[int] = Counter()
        self._waiting: list[Job] = []
        self._running: list[Job] = []
        self._in_flight: deque[tuple[list[Job], Plan, Any]] = deque()
        self._writes: list[tuple[int, int, int]] = []
        self.plans: list[Plan] = []

    def run(self, jobs: list[Job]) -> list[Job]:
        self._waiting = list(jobs)
        while self._waiting or self._running:
            self.step()
        return jobs

    def step(self) -> None:
        planned = self._plan()
        if planned is not None:
            jobs, plan = planned
            self.plans.append(plan)
            pending = self._runner.forward(plan)
            self._runner.sample(pending)
            self._in_flight.append((jobs, plan, pending))
        if self._in_flight and (planned is None or len(self._in_flight) >= self._depth):
            jobs, plan, pending = self._in_flight.popleft()
            self._settle(jobs, plan, pending.wait())
        for job in [job for job in self._running if job.done]:
            self._leave(job)
        idle = [job for job in self._running if job.in_flight == 0]
        if idle and not self._calm and self._rng.random() < 0.05:
            job = self._rng.choice(idle)
            self._leave(job)
            job.dispatched = 0
            self._waiting.append(job)

    def _plan(self) -> tuple[list[Job], Plan] | None:
        joins = []
        while self._waiting and self._free_rows and (self._calm or self._rng.random() < 0.6):
            joins.append(self._join(self._waiting.pop(self._rng.randrange(len(self._waiting)))))
        order = self._rng.sample(self._running, len(self._running))
        joined = {join.uid for join in joins}
        spans: list[tuple[Job, int, bool]] = []
        for job in order:
            if job.pending <= 0 or job.failed is not None:
                continue
            if job.uid not in joined and not self._calm and self._rng.random() < 0.2:
                continue
            length = min(job.pending, self._chunk if self._calm else self._rng.randint(1, self._chunk))
            if not self._grow(job, job.dispatched + length):
                continue
            samples = length == job.pending and job.wants_more
            spans.append((job, length, samples))
        if not spans:
            assert not joins, "a join without a span"
            return None
        starts = [job.dispatched for job, _, _ in spans]
        for job, length, samples in spans:
            job.dispatched += length
            job.promised += samples
            job.in_flight += 1
        writes = np.array(self._writes, np.int32).reshape(-1, 3)
        self._writes = []
        return [job for job, _, _ in spans], Plan(
            step=len(self.plans),
            rows=np.array([job.row for job, _, _ in spans], np.int32),
            starts=np.array(starts, np.int32),
            lengths=np.array([length for _, length, _ in spans], np.int32),
            samples=np.array([samples for _, _, samples in spans], np.bool_),
            joins=tuple(joins),
            page_rows=writes[:, 0],
            page_index=writes[:, 1],
            page_ids=writes[:, 2],
        )

    def _join(self, job: Job) -> Join:
        job.row = self._free_rows.pop(self._rng.randrange(len(self._free_rows)))
        self._share(job)
        self._running.append(job)
        known = np.array(job.known, np.int32)
        pages = np.array(job.pages, np.int32)
        return Join(job.row, job.uid, known, pages, len(job.prompt), job.sampling, job.logprobs)

    def _share(self, job: Job) -> None:
        """Take over the pages of the longest computed prefix that somebody who runs has in common."""
        limit = len(job.known) - 1
        if job.logprobs is not None and job.logprobs.prompt_from >= 0:
            limit = min(limit, max(job.logprobs.prompt_from - 1, 0))
        best: list[int] = []
        for other in self._running:
            if other.failed is not None:
                continue
            settled = min(other.dispatched, len(other.known), limit)
            common = 0
            while common < settled and other.known[common] == job.known[common]:
                common += 1
            pages = other.pages[: common // self._page_size]
            best = max(best, pages, key=len)
        job.pages = list(best)
        job.dispatched = len(best) * self._page_size
        self._holders.update(best)

    def _grow(self, job: Job, upto: int) -> bool:
        short = -(-upto // self._page_size) - len(job.pages)
        if short > len(self._free_pages):
            return False
        for _ in range(short):
            page = self._free_pages.pop(self._rng.randrange(len(self._free_pages)))
            self._writes.append((job.row, len(job.pages), page))
            job.pages.append(page)
            self._holders[page] += 1
        return True

    def _leave(self, job: Job) -> None:
        self._running.remove(job)
        self._free_rows.append(job.row)
        self._writes = [write for write in self._writes if write[0] != job.row]
        self._holders.subtract(job.pages)
        self._free_pages += [page for page in job.pages if not self._holders[page]]
        job.pages = []

    def _settle(self, jobs: list[Job], plan: Plan, outcome: Outcome) -> None:
        tokens = iter(outcome.tokens)
        assert len(outcome.tokens) == int(plan.samples.sum())
        for span, (job, samples) in enumerate(zip(jobs, plan.samples.tolist(), strict=True)):
            job.in_flight -= 1
            token = next(tokens) if samples else None
            job.promised -= samples
            if job.failed is not None or span in outcome.failed:
                job.failed = job.failed or outcome.failed[span]
                continue
            if token is not None:
                job.output.append(token)
                if job.logprobs is not None:
                    job.scores.append(outcome.scores[span])
            if span in outcome.prompt_scores:
                job.prompt_scores.append(outcome.prompt_scores[span])
