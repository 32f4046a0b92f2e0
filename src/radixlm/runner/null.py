"""This module owns the runner that computes no model: it checks plans against mirrored tables and makes up tokens.

The next token is a hash of all tokens before it (and of the seed, if tokens are drawn), so that a text does not depend
on how it was scheduled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from radixlm.base.facts import EngineFacts
from radixlm.base.plan import Floats, Join, Outcome, Plan, TokenScores
from radixlm.base.request import LogprobParams
from radixlm.runner.base import Masks
from radixlm.runner.clock import CostModel, VirtualClock
from radixlm.runner.mirror import GOLDEN, Index, Mirror, Words, fractions, mix

#: Length of vectors where the model's is not known.
NULL_HIDDEN = 64


@dataclass(slots=True, eq=False)
class NullPending:
    """A step in flight until the clock reaches `done_at`."""

    plan: Plan
    done_at: float
    clock: VirtualClock
    tokens: list[int] = field(default_factory=list)
    scores: dict[int, TokenScores] = field(default_factory=dict)
    prompt_scores: dict[int, TokenScores] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    vectors: dict[int, Floats] = field(default_factory=dict)

    def wait(self) -> Outcome:
        self.clock.reach(self.done_at)
        return Outcome(self.plan.step, self.tokens, self.scores, self.prompt_scores, self.failed, self.vectors)


class NullRunner:
    """Same interface as `runner.Runner`.

    Args:
        facts: what it pretends to be: vocabulary, eos ids, context and pool are taken from it.
        end_probability: chance of each token to be the first eos id.
        cost, clock: what a step costs, and the clock that `Pending.wait` moves on. Without them no time passes.
        verify_every: see `Mirror`.
        fails: (uid, position) -> why the token at this position cannot be sampled, or None.
    """

    def __init__(
        self,
        facts: EngineFacts,
        *,
        end_probability: float = 0.0,
        cost: CostModel | None = None,
        clock: VirtualClock | None = None,
        verify_every: int = 1,
        fails: Callable[[int, int], str | None] | None = None,
    ) -> None:
        self.facts = facts
        self._cost = cost or CostModel()
        self._clock = clock or VirtualClock()
        self._free_at = 0.0  # when the device is done with all that is queued
        self._end_probability = end_probability
        self._fails = fails
        model, pool = facts.model, facts.pool
        self._mirror = Mirror(pool.max_running, model.context_length, pool.pages, pool.page_size, verify_every)
        self._joins: dict[int, Join] = {}  # by row
        self._salt = np.zeros(pool.max_running, np.uint64)
        self._free_from = np.zeros(pool.max_running, np.int64)  # first position at which the text may end
        self._scored = np.zeros(pool.max_running, np.bool_)  # rows that ask for log-probabilities
        self._pooled = np.zeros(pool.max_running, np.bool_)  # rows that ask for a vector
        eos = [token for token in model.eos_ids if token < model.sampled_vocab_size]
        self._eos = eos[0] if eos else None
        self._ordinary = np.setdiff1d(np.arange(model.sampled_vocab_size), eos)

    def forward(self, plan: Plan) -> NullPending:
        """Take in the plan. Raises `PlanError` if it contradicts the ones before it."""
        self._mirror.apply(plan)
        for join in plan.joins:
            self._join(join)
        seconds = self._cost.seconds(int(plan.lengths.sum()), int((plan.starts + plan.lengths).sum()))
        self._free_at = max(self._free_at, self._clock.now) + seconds
        pending = NullPending(plan, self._free_at, self._clock)
        for span in np.flatnonzero(self._scored[plan.rows]).tolist():
            self._score_prompt(pending, span)
        for span in np.flatnonzero(self._pooled[plan.rows]).tolist():
            self._pool(pending, span)
        return pending

    def sample(self, pending: NullPending, masks: Masks | None = None) -> None:
        plan, mirror = pending.plan, self._mirror
        spans = np.flatnonzero(plan.samples)
        rows, ends = plan.rows[spans].astype(np.int64), (plan.starts + plan.lengths)[spans].astype(np.int64)
        words = mix(mirror.sums[rows, ends - 1] ^ self._salt[rows])
        tokens = self._choose(words, rows, ends)
        for span, allowed in (masks or {}).items():
            i = int(np.searchsorted(spans, span))
            ids = np.flatnonzero(np.unpackbits(np.ascontiguousarray(allowed).view(np.uint8), bitorder="little"))
            tokens[i] = ids[int(words[i]) % len(ids)]
        mirror.append(rows, ends, tokens)
        pending.tokens = tokens.tolist()
        for i in np.flatnonzero(self._scored[rows]).tolist():
            asked = self._joins[int(rows[i])].logprobs
            assert asked is not None
            pending.scores[int(spans[i])] = self._scores(int(rows[i]), int(ends[i]), 1, asked)
        if self._fails is not None:
            for span, row, end in zip(spans.tolist(), rows.tolist(), ends.tolist(), strict=True):
                if (reason := self._fails(self._joins[row].uid, end)) is not None:
                    pending.failed[span] = reason

    def _join(self, join: Join) -> None:
        row, params = join.row, join.sampling
        self._joins[row] = join
        self._salt[row] = 0 if params.greedy else mix(np.array([params.seed]).view(np.uint64) + GOLDEN)[0]
        self._free_from[row] = join.prompt_len + params.min_new_tokens
        self._scored[row] = join.logprobs is not None
        self._pooled[row] = join.pooling is not None

    def _choose(self, words: Words, rows: Index, ends: Index) -> Index:
        tokens = self._ordinary[(words % np.uint64(len(self._ordinary))).astype(np.int64)]
        free = ends >= self._free_from[rows]
        if self._eos is not None and self._end_probability > 0.0:
            tokens[free & (fractions(mix(words)) < self._end_probability)] = self._eos
        for i in np.flatnonzero(~free).tolist():
            stops = self._joins[int(rows[i])].sampling.stop_token_ids
            if tokens[i] in stops:
                tokens[i] = np.setdiff1d(self._ordinary, stops)[0]
        return tokens

    def _pool(self, pending: NullPending, span: int) -> None:
        """A made-up vector: a function of the whole prompt, told by the span that ends it."""
        plan = pending.plan
        row, end = int(plan.rows[span]), int(plan.starts[span] + plan.lengths[span])
        join = self._joins[row]
        size = self.facts.model.hidden_size or NULL_HIDDEN
        vector = np.zeros(size, np.float32)
        if end == join.prompt_len:
            words = mix(self._mirror.sums[row, end - 1] ^ mix(np.arange(size).view(np.uint64)))
            vector = (2 * fractions(words) - 1).astype(np.float32) * (end if join.pooling == "mean" else 1)
        pending.vectors[span] = vector

    # ---- made-up log-probabilities: below 0, and a function of the prefix and the id alone

    def _score_prompt(self, pending: NullPending, span: int) -> None:
        plan = pending.plan
        row, start, length = int(plan.rows[span]), int(plan.starts[span]), int(plan.lengths[span])
        join = self._joins[row]
        assert join.logprobs is not None
        first = max(join.logprobs.prompt_from, start + 1)
        count = min(start + length + 1, join.prompt_len) - first
        if join.logprobs.prompt_from >= 0 and (count > 0 or first == join.prompt_len == 1):
            pending.prompt_scores[span] = self._scores(row, first, count, join.logprobs)

    def _scores(self, row: int, first: int, count: int, asked: LogprobParams) -> TokenScores:
        """The alternatives of a token are the ids after it, each 1 less probable than the last."""
        positions = np.arange(first, first + count)
        ids = self._mirror.tokens[row, positions].astype(np.int64)[:, None]
        before = self._mirror.sums[row, positions - 1][:, None]
        wanted = np.array(asked.token_ids, np.int64)[None, :]
        chosen, picked = (-1.0 - fractions(mix(before ^ mix(some.view(np.uint64)))) for some in (ids, wanted))
        steps = np.arange(asked.top)
        return TokenScores(
            position=first,
            chosen=chosen[:, 0].astype(np.float32),
            top_ids=((ids + steps) % self.facts.model.sampled_vocab_size).astype(np.int32),
            top=(chosen - steps).astype(np.float32),
            picked=picked.astype(np.float32),
        )
