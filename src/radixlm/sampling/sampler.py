"""This module owns the choice of the next token of every row of a step, in one pass whatever its rows ask for.

The order, for each row: the model's scores in float32; mask of allowed ids; logit_bias; ids that end the text forbidden
until min_new_tokens; repetition, frequency and presence penalties; then the best score if the row is greedy, else
temperature; top_k; top_p; min_p; one draw. What a row gets depends on its own scores, parameters, seed and position,
never on the rows beside it: every reduction is within a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from radixlm.device.base import Device
from radixlm.ops import gpu
from radixlm.sampling import rank
from radixlm.sampling.adjust import Adjuster, Masks
from radixlm.sampling.draw import draw_filtered, draw_free
from radixlm.sampling.filters import Wishes
from radixlm.sampling.table import Batch, Need
from radixlm.sampling.uniform import uniforms

#: No model means a score beyond this. The bound leaves room in float32 for penalties and small temperatures.
LARGEST_SCORE = 1e30

#: Bytes of float32 scores worked on at once on a CPU: a part that stays in its caches.
PART_BYTES = 8 << 20

OK, NOT_FINITE, NOTHING_ALLOWED = 0, 1, 2
REASONS = {
    NOT_FINITE: "the model's scores are not finite numbers for this request; its weights may be broken",
    NOTHING_ALLOWED: "no token is allowed as the next one",
}


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """On the device: `tokens` [n] int64, `status` [n] int8 (see `REASONS`). The token of a row that is not OK is 0."""

    tokens: torch.Tensor
    status: torch.Tensor


class Sampler:
    """
    Args:
        tokens: the token table [rows, columns], read for penalties.
        vocab_size: ids from here on are padding: never chosen, whatever their scores.
    """

    def __init__(self, tokens: torch.Tensor, vocab_size: int, device: Device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._adjuster = Adjuster(tokens, device)
        small = max(1, PART_BYTES // (4 * vocab_size))
        self._part = small if device.kind == "cpu" else 1 << 30

    def sample(self, logits: torch.Tensor, batch: Batch, masks: Masks | None = None) -> Sampled:
        """Choose a token for each row of logits [n, at least vocab_size], which are not changed."""
        parts = []
        count = len(logits)
        for start in range(0, max(count, 1), self._part):
            stop = min(start + self._part, count)
            scores = logits[start:stop, : self._vocab_size].float()
            allowed = {i - start: words for i, words in (masks or {}).items() if start <= i < stop}
            parts.append(self._sample(scores, batch if stop - start == count else batch.part(start, stop), allowed))
        if len(parts) == 1:
            return parts[0]
        return Sampled(torch.cat([p.tokens for p in parts]), torch.cat([p.status for p in parts]))

    def best(self, logits: torch.Tensor) -> Sampled:
        """The most probable token of each row of logits, and whether the scores are sound: what greedy rows get."""
        scores = logits[:, : self._vocab_size]
        if (kernels := gpu.kernels(scores)) is not None:
            return Sampled(*kernels.best(scores, LARGEST_SCORE, NOT_FINITE))
        top, tokens = scores.max(-1)
        status = torch.where(top.float().abs() < LARGEST_SCORE, OK, NOT_FINITE)
        return Sampled(torch.where(status == OK, tokens, 0), status.to(torch.int8))

    def _sample(self, scores: torch.Tensor, batch: Batch, masks: Masks) -> Sampled:
        top, tokens = rank.best(scores)
        # NaN and both infinities fail this comparison.
        sound = top.abs() < LARGEST_SCORE
        status = torch.where(sound, OK, NOT_FINITE)
        if masks or batch.needs.adjusts:
            scores = self._adjuster.adjusted(scores, batch, masks)
            top, tokens = rank.best(scores)
            status = torch.where(sound & (top == -torch.inf), NOTHING_ALLOWED, status)
        if batch.needs & Need.DRAW:
            wishes = self._wishes(batch)
            filtered = batch.flags & Need.FILTER != 0
            drawing = batch.flags & Need.DRAW != 0
            for draw, index in (
                (draw_free, np.flatnonzero(drawing & ~filtered)),
                (draw_filtered, np.flatnonzero(drawing & filtered)),
            ):
                if len(index) == len(scores):
                    tokens = draw(scores, wishes)
                elif len(index):
                    rows = self._device.upload(index)
                    tokens = tokens.index_copy(0, rows, draw(scores.index_select(0, rows), wishes.take(rows)))
        return Sampled(torch.where(status == OK, tokens, 0), status.to(torch.int8))

    def _wishes(self, batch: Batch) -> Wishes:
        table, rows = batch.table, batch.rows
        numbers = uniforms(table.seed[rows], batch.positions)
        columns = (table.temperature[rows], table.top_k[rows], table.top_p[rows], table.min_p[rows], numbers)
        return Wishes(*self._device.upload(np.stack(columns)).unbind(0))
