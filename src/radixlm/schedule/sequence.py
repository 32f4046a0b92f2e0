"""This module owns `Sequence`: what the engine knows of a request. Only the `schedule` package changes it."""

from __future__ import annotations

from array import array

import numpy as np

from radixlm.base.plan import Floats, Ints
from radixlm.base.request import LogprobParams, Request
from radixlm.cache.ports import Lease
from radixlm.schedule.guide import Guide
from radixlm.wire.messages import Finish, Stats


class Sequence:
    """Three counters tell where it stands, and there are no phases besides:

    - committed, `len(tokens)`: tokens the host has seen (the prompt, then what was sampled);
    - `promised`: tokens being sampled by steps in flight;
    - `dispatched`: tokens whose KV is written, or will be by a step in flight.

    What remains to compute is `len(tokens) + promised - dispatched`: a whole prompt, the rest of one, or a single
    token.

    Attributes:
        limit: length at which it ends: prompt plus `max_new_tokens`, cut to what the context and the pool can hold.
        computed: tokens whose KV is known to be written (by committed steps); what may be published.
        in_flight: steps in flight that touch its row. Its pages and row are given back only at 0.
        known_pages: how many of its lease's pages the device's page table has.
        scored: prompt positions below this have had their log-probabilities sent.
        finish: set once it has ended; later tokens of steps in flight are dropped.
        guide: what steers it, None for nothing. It has taken every token behind the prompt.
        jumped: tokens that were appended without sampling.
        foretold: samples in flight that are dropped, because their tokens were forced and are known already.
        unwritten: first position whose token the device has not been told, -1 for none.
        unsaid: forced tokens right behind the prompt that go out with the first step.
        vector: of a request with `pooling`, what its spans made of it so far.
    """

    __slots__ = (
        "cached_tokens", "computed", "dispatched", "ended", "finish", "first_token", "foretold", "guide", "in_flight",
        "jumped", "known_pages", "lease", "limit", "promised", "prompt_len", "request", "retractions", "row", "scored",
        "started", "stop_ids", "tokens", "uid", "unsaid", "unwritten",
        "vector",
    )  # fmt: skip

    def __init__(self, request: Request, limit: int, eos_ids: frozenset[int]) -> None:
        self.request = request
        self.uid = request.uid
        self.tokens = array("i", request.tokens)  # 32-bit: becomes a numpy array by a plain copy
        self.prompt_len = len(self.tokens)
        self.limit = limit
        extra = frozenset(request.sampling.stop_token_ids)
        self.stop_ids = extra if request.sampling.ignore_eos else extra | eos_ids
        self.row = -1
        self.lease: Lease | None = None
        self.promised = 0
        self.dispatched = 0
        self.computed = 0
        self.in_flight = 0
        self.known_pages = 0
        self.scored = 0
        self.finish: Finish | None = None
        self.cached_tokens = 0
        self.retractions = 0
        self.started = 0.0
        self.first_token = 0.0
        self.ended = False
        self.guide: Guide | None = None
        self.jumped = 0
        self.foretold = 0
        self.unwritten = -1
        self.unsaid = 0
        self.vector: Floats | None = None

    @property
    def pending(self) -> int:
        """Tokens that are known, or promised, and not dispatched."""
        return len(self.tokens) + self.promised - self.dispatched

    @property
    def extending(self) -> bool:
        """More than the newest token is to be computed."""
        return self.pending > 1 or (len(self.tokens) <= self.prompt_len and self.promised == 0)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def remaining(self) -> int:
        """Tokens it may still generate."""
        return self.limit - len(self.tokens) - self.promised

    @property
    def prefix_limit(self) -> int:
        """How long a cached prefix is usable: never the last token (its logits are needed), nor a position to be
        scored, nor one whose hidden state is part of a vector.
        """
        limit = len(self.tokens) - 1
        if self.request.pooling not in (None, "last"):
            return 0
        scores = self.request.logprobs
        if scores is not None and scores.prompt_from >= 0 and self.scored < self.prompt_len:
            limit = min(limit, max(scores.prompt_from, self.scored, 1) - 1)
        return limit

    @property
    def wants_history(self) -> bool:
        """What its newest promised token may be depends on tokens that are not known yet."""
        return self.guide is not None and self.guide.slack < self.promised

    def token_array(self, upto: int | None = None) -> Ints:
        return np.array(self.tokens if upto is None else self.tokens[:upto], dtype=np.int32)

    def logprobs_from_here(self) -> LogprobParams | None:
        """What to score from now on: prompt positions that were sent before a pause are not sent again."""
        scores = self.request.logprobs
        if scores is None or scores.prompt_from < 0 or self.scored == 0:
            return scores
        start = -1 if self.scored >= self.prompt_len else max(self.scored, scores.prompt_from)
        return LogprobParams(top=scores.top, prompt_from=start, token_ids=scores.token_ids)

    def stats(self, now: float) -> Stats:
        return Stats(
            prompt_tokens=self.prompt_len,
            completion_tokens=self.generated,
            cached_tokens=self.cached_tokens,
            retractions=self.retractions,
            arrived=self.request.arrival,
            started=self.started,
            first_token=self.first_token,
            ended=now,
            jump_forward_tokens=self.jumped,
        )
