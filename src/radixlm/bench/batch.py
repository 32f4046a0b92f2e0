"""This module owns the plans of one batch, from its prompts to its last token, and the time each step takes."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from radixlm.base.errors import BadRequest
from radixlm.base.facts import EngineFacts
from radixlm.base.plan import Join, Plan
from radixlm.base.sampling import SamplingParams
from radixlm.bench.source import FIRST_RANDOM_ID

if TYPE_CHECKING:
    from radixlm.runner.base import Executor


@dataclass(frozen=True, slots=True)
class Shape:
    """A batch: `batch` prompts of `input_len` tokens, `output_len` tokens out of each."""

    batch: int
    input_len: int
    output_len: int

    def check(self, facts: EngineFacts) -> None:
        """Raise `BadRequest` if the engine cannot hold the batch."""
        for name, flag in (("batch", "--batch-size"), ("input_len", "--input-len"), ("output_len", "--output-len")):
            if getattr(self, name) < 1:
                raise BadRequest(f"{flag} is {getattr(self, name)}; it must be at least 1", param=name)
        tokens = self.input_len + self.output_len
        if tokens > facts.model.context_length:
            raise BadRequest(f"{tokens} tokens are more than the context of {facts.model.context_length}")
        if self.batch > facts.pool.max_running:
            raise BadRequest(
                f"a batch of {self.batch} is more than the {facts.pool.max_running} rows there are; raise "
                "--max-running-requests"
            )
        if self.batch * self.pages(facts) > facts.pool.pages:
            raise BadRequest(
                f"{self.batch} x {tokens} tokens do not fit into the pool of {facts.pool.tokens}; raise "
                "--max-total-tokens"
            )

    def pages(self, facts: EngineFacts) -> int:
        """Pages of one row."""
        return -(-(self.input_len + self.output_len) // facts.pool.page_size)


@dataclass(frozen=True, slots=True)
class Timed:
    """A step and what it took."""

    plan: Plan
    seconds: float


def prefill_plans(shape: Shape, facts: EngineFacts, budget: int, seed: int) -> Iterator[Plan]:
    """Plans that compute all prompts: rows one after another, `budget` tokens a step. Each row samples once."""
    rng = random.Random(seed)
    pages = shape.pages(facts)
    vocab_size = facts.model.sampled_vocab_size
    ids = range(FIRST_RANDOM_ID if vocab_size > 2 * FIRST_RANDOM_ID else 0, vocab_size)
    sampling = SamplingParams(temperature=0.0, max_new_tokens=shape.output_len, ignore_eos=True)
    row, start, step = 0, 0, 0
    while row < shape.batch:
        spans: list[tuple[int, int, int]] = []
        joins = []
        left = budget
        while left and row < shape.batch:
            if start == 0:
                tokens = np.array([rng.choice(ids) for _ in range(shape.input_len)], np.int32)
                joins.append(Join(row, row, tokens, np.empty(0, np.int32), shape.input_len, sampling))
            length = min(left, shape.input_len - start)
            spans.append((row, start, length))
            left -= length
            start += length
            if start == shape.input_len:
                row, start = row + 1, 0
        rows, starts, lengths = (np.array(column, np.int32) for column in zip(*spans, strict=True))
        joined = np.array([join.row for join in joins], np.int32)
        index = np.arange(pages, dtype=np.int32)
        yield Plan(
            step=step,
            rows=rows,
            starts=starts,
            lengths=lengths,
            samples=starts + lengths == shape.input_len,
            joins=tuple(joins),
            page_rows=joined.repeat(pages),
            page_index=np.tile(index, len(joined)),
            page_ids=(joined[:, None] * pages + index).reshape(-1).astype(np.int32),
        )
        step += 1


def decode_plans(shape: Shape, first_step: int) -> Iterator[Plan]:
    """Plans that generate the tokens after the first: every row, one token a step."""
    rows = np.arange(shape.batch, dtype=np.int32)
    ones = np.ones(shape.batch, np.int32)
    samples = np.ones(shape.batch, np.bool_)
    for i in range(shape.output_len - 1):
        starts = np.full(shape.batch, shape.input_len + i, np.int32)
        yield Plan(step=first_step + i, rows=rows, starts=starts, lengths=ones, samples=samples)


def execute(executor: Executor, plan: Plan) -> Timed:
    """Run one step from beginning to end."""
    started = time.perf_counter()
    pending: Any = executor.forward(plan)
    executor.sample(pending)
    outcome = pending.wait()
    seconds = time.perf_counter() - started
    if outcome.failed:
        raise BadRequest(f"a step failed: {next(iter(outcome.failed.values()))}")
    return Timed(plan, seconds)


def run_batch(executor: Executor, shape: Shape, budget: int, seed: int) -> tuple[list[Timed], list[Timed]]:
    """(prefill steps, decode steps) of one batch."""
    prefill = [execute(executor, plan) for plan in prefill_plans(shape, executor.facts, budget, seed)]
    decode = [execute(executor, plan) for plan in decode_plans(shape, len(prefill))]
    return prefill, decode
