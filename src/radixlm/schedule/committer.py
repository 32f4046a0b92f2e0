"""This module owns what is done with an outcome: tokens appended, endings found, computed prefixes published, news
written.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from radixlm.base.errors import RadixError
from radixlm.base.plan import Outcome, Plan, TokenScores
from radixlm.cache.ports import Cache
from radixlm.schedule.planner import Planner
from radixlm.schedule.sequence import Sequence
from radixlm.schedule.steering import Steering
from radixlm.wire.messages import Extra, Failed, Fault, Finish, Scores, ToDetokenizer, Tokens


class Committer:
    """Turns (plan, outcome) into the step's messages. `end` is called for each sequence that ended, and again when the
    last step that touched it has come back."""

    def __init__(
        self,
        cache: Cache,
        planner: Planner,
        end: Callable[[Sequence, Finish | Fault, float], None],
        steering: Steering | None = None,
    ) -> None:
        self._cache = cache
        self._planner = planner
        self._end = end
        self._steering = steering

    def commit(
        self, plan: Plan, sequences: list[Sequence], outcome: Outcome, now: float
    ) -> tuple[list[ToDetokenizer], int]:
        """The step's messages and how many tokens it generated."""
        messages: list[ToDetokenizer] = []
        uids: list[int] = []
        ids: list[int] = []
        extras: list[Extra] = []
        sampled = iter(outcome.tokens)
        ends = (plan.starts + plan.lengths).tolist()
        plain = not (outcome.scores or outcome.prompt_scores or outcome.failed)
        for i, (s, end, samples) in enumerate(zip(sequences, ends, plan.samples.tolist(), strict=True)):
            token = next(sampled) if samples else -1
            s.in_flight -= 1
            foretold = samples and s.foretold > 0
            if foretold:
                s.foretold -= 1
            elif samples:
                s.promised -= 1
            if s.finish is not None:
                if s.finish.kind != "abort":
                    s.computed = min(end, len(s.tokens))
                if s.in_flight == 0:
                    self._end(s, s.finish, now)
                continue
            if not plain and i in outcome.failed:
                s.computed = plan.starts[i].item()  # what this step wrote is not to be trusted
                messages.append(self._fail(s, Fault(500, "model_error", outcome.failed[i]), now))
                continue
            s.computed = end
            if foretold:
                continue
            if not samples:
                self._publish(s)
                prompt_scores = _prompt_scores(s, outcome.prompt_scores.get(i))
                if i in outcome.vectors:
                    part = outcome.vectors[i]
                    s.vector = part if s.vector is None else s.vector + part
                if s.limit <= len(s.tokens) == s.computed:
                    s.finish = Finish("length")
                    extras.append(Extra(s.uid, None, prompt_scores, s.finish, s.stats(now), _vector(s)))
                    self._end(s, s.finish, now)
                elif prompt_scores is not None:
                    extras.append(Extra(s.uid, None, prompt_scores))
                continue
            s.tokens.append(token)
            said = 1 + s.unsaid
            s.unsaid = 0
            first = s.first_token == 0.0
            if first:
                s.first_token = now
                self._publish(s)
            if token in s.stop_ids and s.generated > s.request.sampling.min_new_tokens:
                s.finish = Finish("stop", token)
            elif s.guide is not None:
                try:
                    said += self._follow(s, token)
                except RadixError as error:
                    messages.append(self._fail(s, fault_of(error, s), now))
                    continue
            elif len(s.tokens) >= s.limit:
                s.finish = Finish("length")
            if said == 1:
                uids.append(s.uid)
                ids.append(token)
            else:
                uids.extend([s.uid] * said)
                ids.extend(s.tokens[-said:])
            scores = prompt_scores = None
            if not plain:
                scores = _scores(s, outcome.scores.get(i))
                prompt_scores = _prompt_scores(s, outcome.prompt_scores.get(i))
            if first or s.finish is not None or scores is not None or prompt_scores is not None:
                stats = s.stats(now) if first or s.finish is not None else None
                extras.append(Extra(s.uid, scores, prompt_scores, s.finish, stats))
            if s.finish is not None:
                self._end(s, s.finish, now)
        if uids or extras:
            messages.append(Tokens(np.array(uids, np.int64).tobytes(), np.array(ids, np.int32).tobytes(), extras))
        return messages, len(ids)

    def _follow(self, sequence: Sequence, token: int) -> int:
        """Tell the guide of a sampled token; how many more it forced. Sets `finish` where that is the end."""
        assert sequence.guide is not None
        assert self._steering is not None
        sequence.guide.take(token)
        jumped = len(self._steering.advance(sequence))
        if jumped:
            self._planner.changed()
        return jumped

    def _fail(self, sequence: Sequence, fault: Fault, now: float) -> Failed:
        sequence.finish = Finish("abort", None, fault.message)
        message = Failed(sequence.uid, fault, sequence.stats(now))
        self._end(sequence, fault, now)
        return message

    def _publish(self, sequence: Sequence) -> None:
        lease = sequence.lease
        assert lease is not None
        if sequence.computed - lease.published >= self._cache.page_size:
            pages = self._cache.publish(lease, sequence.token_array(sequence.computed), sequence.computed)
            self._planner.remapped(sequence, pages)


def fault_of(error: RadixError, sequence: Sequence) -> Fault:
    """What ended a guided sequence. Where its input is to blame, that is its grammar."""
    grammar = sequence.request.grammar
    param = grammar.param if grammar is not None and error.status == 400 else ""
    return Fault(error.status, error.code, error.message, error.param or param)


def _vector(sequence: Sequence) -> bytes | None:
    """The finished vector of a request with `pooling`."""
    vector = sequence.vector
    if vector is None:
        return None
    if sequence.request.pooling == "mean":
        vector = vector / np.float32(sequence.prompt_len)
    return vector.astype("<f4").tobytes()


def _scores(sequence: Sequence, scores: TokenScores | None) -> Scores | None:
    return None if scores is None else _to_wire(sequence.tokens[-1:].tolist(), scores, [])


def _prompt_scores(sequence: Sequence, scores: TokenScores | None) -> Scores | None:
    """One part of the prompt's scores. The very first token has none: nothing precedes it."""
    if scores is None:
        return None
    asked = sequence.request.logprobs
    assert asked is not None
    head = sequence.tokens[:1].tolist() if asked.prompt_from == 0 and scores.position == 1 else []
    end = scores.position + len(scores.chosen)
    sequence.scored = max(sequence.scored, end)
    return _to_wire(sequence.tokens[scores.position : end].tolist(), scores, head)


def _to_wire(ids: list[int], scores: TokenScores, head: list[int]) -> Scores:
    tops = [
        list(zip(row_ids, row, strict=True))
        for row_ids, row in zip(scores.top_ids.tolist(), scores.top.tolist(), strict=True)
    ]
    chosen: list[float | None] = [None for _ in head]
    chosen.extend(scores.chosen.tolist())
    return Scores(head + ids, chosen, [[] for _ in head] + tops, [[] for _ in head] + scores.picked.tolist())
