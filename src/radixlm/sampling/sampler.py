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
from radixlm.sampling import rank
from radixlm.sampling.adjust import Adjuster, Masks
from radixlm.sampling.draw import draw_from_all, draw_from_few, masses
from radixlm.sampling.filters import CANDIDATES, Filters, cuts
from radixlm.sampling.table import Batch, Index, Need
from radixlm.sampling.uniform import uniforms

#: No model means a score beyond this. The bound leaves room in float32 for penalties and small temperatures.
LARGEST_SCORE = 1e30

#: Bytes of float32 scores worked on at once on a CPU: a part that stays in its caches.
PART_BYTES = 4 << 20

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

    def _sample(self, scores: torch.Tensor, batch: Batch, masks: Masks) -> Sampled:
        top, tokens = rank.best(scores)
        # NaN and both infinities fail this comparison.
        sound = top.abs() < LARGEST_SCORE
        status = torch.where(sound, OK, NOT_FINITE)
        if masks or batch.needs.adjusts:
            scores = scores.clone(memory_format=torch.contiguous_format)
            self._adjuster.apply(scores, batch, masks)
            top, tokens = rank.best(scores)
            status = torch.where(sound & (top == -torch.inf), NOTHING_ALLOWED, status)
        if batch.needs & Need.DRAW:
            index = batch.having(Need.DRAW)
            drawn = self._draw(self._take(scores, index), batch, index)
            tokens = self._put(tokens, index, drawn)
        return Sampled(torch.where(status == OK, tokens, 0), status.to(torch.int8))

    def _draw(self, scores: torch.Tensor, batch: Batch, index: Index) -> torch.Tensor:
        """Draw for these rows of the batch, scores [m, V]. What is needed for which row, the host knows."""
        table, rows = batch.table, batch.rows[index]
        numbers = uniforms(table.seed[rows], batch.positions[index])
        columns = (table.temperature[rows], table.top_k[rows], table.top_p[rows], table.min_p[rows], numbers)
        temperature, top_k, top_p, min_p, uniform = self._device.upload(np.stack(columns)).unbind(0)
        filtered = np.flatnonzero(batch.flags[index] & Need.FILTER)
        if not len(filtered):
            return draw_from_all(scores, temperature, None, uniform)

        some, vocab = self._take(scores, filtered), scores.shape[1]
        filters = Filters(*(self._take(column, filtered) for column in (temperature, top_k, top_p, min_p)))
        mass = torch.ones_like(filters.temperature)
        whole = np.flatnonzero((table.top_p[rows[filtered]] < 1.0) & (table.top_k[rows[filtered]] >= vocab))
        if len(whole):
            of_whole = masses(self._take(some, whole), self._take(filters.temperature, whole))
            mass = self._put(mass, whole, of_whole)
        if self._device.kind != "cpu":
            # A sort costs a GPU less than telling the host which rows can do without.
            cut = cuts(some, rank.falling(some, vocab), mass, filters)
            everywhere = self._put(scores.new_full((len(scores),), -torch.inf), filtered, cut)
            return draw_from_all(scores, temperature, everywhere, uniform)

        values, ids = rank.largest(some, CANDIDATES)
        cut = cuts(some, values, mass, filters)
        listed = np.flatnonzero((cut > values[:, -1]).numpy() | (values.shape[1] == vocab))
        few = filtered[listed]
        take = self._take
        listed_draws = draw_from_few(
            take(values, listed),
            take(ids, listed),
            take(filters.temperature, listed),
            take(cut, listed),
            take(uniform, few),
        )
        drawn = self._put(torch.empty(len(scores), dtype=torch.int64), few, listed_draws)
        many = np.setdiff1d(np.arange(len(scores)), few)
        if len(many):
            everywhere = self._put(scores.new_full((len(scores),), -torch.inf), filtered, cut)
            draws = draw_from_all(
                take(scores, many), take(temperature, many), take(everywhere, many), take(uniform, many)
            )
            drawn = self._put(drawn, many, draws)
        return drawn

    def _take(self, tensor: torch.Tensor, index: Index) -> torch.Tensor:
        """The entries at `index`, rising; the tensor itself if that is all of them."""
        return tensor if len(index) == len(tensor) else tensor[self._device.upload(index)]

    def _put(self, tensor: torch.Tensor, index: Index, entries: torch.Tensor) -> torch.Tensor:
        """The tensor with other entries at `index`, rising."""
        return entries if len(index) == len(tensor) else tensor.index_copy(0, self._device.upload(index), entries)
