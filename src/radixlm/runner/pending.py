"""This module owns a step in flight: what was queued for a plan, and how it becomes an `Outcome`."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from radixlm.base.plan import Floats, Outcome, Plan, TokenScores
from radixlm.base.request import LogprobParams
from radixlm.device.base import Download
from radixlm.sampling.logprobs import Scored, take
from radixlm.sampling.sampler import NOT_FINITE, REASONS, Sampled
from radixlm.sampling.table import Batch, Index


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """Scores that are on their way for one span: entries `where` of their `Scored`, the first of them at `position`."""

    span: int
    where: slice
    position: int
    params: LogprobParams


@dataclass(slots=True, eq=False)
class PendingStep:
    """Filled by the runner's `forward`, then by its `sample`.

    Attributes:
        spans: indices of the spans that sample; `batch` has a row for each.
        logits: [n, vocab] of these spans, until they are sampled.
        best: the most probable tokens, where the forward pass chose them as well (and wrote them to the table).
        scores, prompt_scores: what each `Asked` is cut from.
        pooled: spans, and what each adds to the vector of its row: [n, hidden_size] float32.
        broken: why the whole step failed.
    """

    plan: Plan
    spans: Index
    batch: Batch
    logits: torch.Tensor | None = None
    best: Sampled | None = None
    scores: list[tuple[list[Asked], Scored]] = field(default_factory=list)
    prompt_scores: list[tuple[list[Asked], Scored]] = field(default_factory=list)
    pooled: tuple[list[int], torch.Tensor] | None = None
    download: Download | None = None
    broken: str | None = None

    def tensors(self, sampled: Sampled) -> list[torch.Tensor]:
        """Everything that the host has to see, in the order in which `wait` reads it."""
        found = [sampled.tokens, sampled.status]
        for _, scored in (*self.scores, *self.prompt_scores):
            found += scored.tensors()
        if self.pooled is not None:
            found.append(self.pooled[1])
        return found

    def wait(self) -> Outcome:
        """Block until the step is done, and tell what came of it."""
        if self.broken is not None:
            everyone = dict.fromkeys(range(len(self.plan.rows)), self.broken)
            return Outcome(self.plan.step, [0] * len(self.spans), failed=everyone)
        assert self.download is not None, "a step is sampled before it is waited for"
        tokens, status, *arrived = self.download.wait()
        failed: dict[int, str] = {}
        if status.any():
            codes = zip(self.spans.tolist(), status.tolist(), strict=True)
            failed = {span: REASONS[code] for span, code in codes if code}
        cut = 4 * len(self.scores)
        return Outcome(
            self.plan.step,
            tokens.tolist(),
            _taken(self.scores, arrived[:cut], failed),
            _taken(self.prompt_scores, arrived[cut:], failed),
            failed,
            _vectors(self.pooled[0], arrived[-1], failed) if self.pooled is not None else {},
        )


def _vectors(spans: list[int], pooled: torch.Tensor, failed: dict[int, str]) -> dict[int, Floats]:
    """Vectors by span; spans whose vectors are not finite go to `failed`."""
    finite = pooled.isfinite().all(dim=1).tolist()
    for span, fine in zip(spans, finite, strict=True):
        if not fine:
            failed.setdefault(span, REASONS[NOT_FINITE])
    return {span: vector for span, vector in zip(spans, pooled.numpy(), strict=True) if span not in failed}


def _taken(
    groups: list[tuple[list[Asked], Scored]], arrived: list[torch.Tensor], failed: dict[int, str]
) -> dict[int, TokenScores]:
    """Scores by span; spans whose scores are not finite go to `failed`."""
    scores: dict[int, TokenScores] = {}
    for i, (everybody, _) in enumerate(groups):
        tensors = arrived[4 * i : 4 * i + 4]
        for asked in everybody:
            part = take(tensors, asked.where, asked.position, asked.params)
            if part is None:
                failed.setdefault(asked.span, REASONS[NOT_FINITE])
            else:
                scores[asked.span] = part
    return scores
