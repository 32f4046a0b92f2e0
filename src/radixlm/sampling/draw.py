"""This module owns drawing an id from a row of scores with one uniform number, by inverting a cumulative sum.

Ids stand in the sum in their own order, so that a draw does not depend on how equal scores were sorted.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from radixlm.sampling.filters import Wishes, cuts, shortlist

#: Columns summed into one before the cumulative sum, see `invert`.
BLOCK = 256


def draw_free(scores: torch.Tensor, wishes: Wishes) -> torch.Tensor:
    """[n] ids drawn from rows of scores [n, V] without a filter."""
    return invert(_weights(scores, wishes.temperature), wishes.uniform)


def draw_filtered(scores: torch.Tensor, wishes: Wishes) -> torch.Tensor:
    """[n] ids drawn from what top_k, top_p and min_p leave of rows of scores [n, V].

    On a CPU most rows are drawn from their few best scores. A GPU sorts everything, which costs less than to wait until
    the host knows which rows can do without.
    """
    if scores.device.type != "cpu":
        return _draw_above(scores, cuts(scores, wishes), wishes)
    values, ids, cut = shortlist(scores, wishes)
    drawn = _draw_listed(values, ids, cut, wishes)
    if values.shape[1] < scores.shape[1]:
        rows = (cut <= values[:, -1]).nonzero()[:, 0]  # more is kept than the list holds
        if len(rows):
            drawn[rows] = _draw_above(scores.index_select(0, rows), cut[rows], wishes.take(rows))
    return drawn


def _draw_above(scores: torch.Tensor, cut: torch.Tensor, wishes: Wishes) -> torch.Tensor:
    weights = _weights(scores, wishes.temperature)
    # A comparison into float32 and a product use vector instructions; masked_fill does not, and takes 15 times as long.
    kept = torch.ge(scores, cut[:, None], out=torch.empty_like(scores))
    weights[:, : scores.shape[1]] *= kept
    return invert(weights, wishes.uniform)


def _draw_listed(values: torch.Tensor, ids: torch.Tensor, cut: torch.Tensor, wishes: Wishes) -> torch.Tensor:
    """Draw from lists of scores and their ids [n, K] that hold all scores above their cuts [n]."""
    order = ids.argsort(-1)
    values, ids = values.gather(1, order), ids.gather(1, order)
    scaled = (values.double() - values.amax(-1, keepdim=True)) / wishes.temperature[:, None]
    running = torch.where(values >= cut[:, None], scaled.exp(), 0.0).cumsum(-1)
    chosen = _first_above(running, _below(wishes.uniform * running[:, -1], running[:, -1]))
    return ids.gather(1, chosen[:, None])[:, 0]


def _weights(scores: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """The softmax of scores [n, V] / temperature [n], padded with zeros to whole blocks."""
    width = scores.shape[1]
    scaled = scores.new_empty(len(scores), -(-width // BLOCK) * BLOCK)
    scaled[:, width:] = -torch.inf
    torch.div(scores, temperature.float()[:, None], out=scaled[:, :width])
    return F.softmax(scaled, -1)


def invert(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The id whose part of the cumulative weight holds `uniforms` of the total.

    Two steps: the block of BLOCK ids, then the id in it, so that the long cumulative sum is only over blocks. An id
    without weight is never the answer. Sums are per row, and in float64 where they are long, so that neither other rows
    nor the length of the vocabulary matter.

    Args:
        weights: [n, k * BLOCK], at least 0, not all of a row 0. Any scale.
        uniforms: [n] float64 in [0, 1).

    Returns:
        [n] int64.
    """
    blocks = weights.view(len(weights), -1, BLOCK)
    totals = blocks.sum(-1).double().cumsum(-1)
    target = _below(uniforms * totals[:, -1], totals[:, -1])
    block = _first_above(totals, target)
    before = torch.where(block > 0, totals.gather(1, (block - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    inside = blocks.gather(1, block[:, None, None].expand(-1, 1, BLOCK))[:, 0].double().cumsum(-1)
    return block * BLOCK + _first_above(inside, _below(target - before, inside[:, -1]))


def _below(value: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """`value`, or the number next below `limit` if rounding took it there."""
    return torch.minimum(value, torch.nextafter(limit, torch.zeros_like(limit)))


def _first_above(rising: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """[n] index of the first number above value [n] in each rising row [n, k]; the last if there is none (NaN)."""
    found = torch.searchsorted(rising, value[:, None], right=True)[:, 0]
    return found.clamp(max=rising.shape[1] - 1)
