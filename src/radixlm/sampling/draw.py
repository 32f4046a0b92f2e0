"""This module owns drawing an id from a row of scores with one uniform number, by a race of exponential times.

Every id that may be drawn gets a time that depends on the row's number and the id alone, divided by its weight; the
shortest wins. That draws each id in proportion to its weight (the Gumbel-max trick; Maddison, Tarlow and Minka,
"A* Sampling", 2014), and it is steady: weights that were rounded differently, as they are in another batch, change
the winner only where two times are that close. To invert a cumulative sum would be cheaper, but there the errors of
all ids move the borders of all ids, and a seed would give another text every few thousand tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from radixlm.sampling.filters import Wishes, cuts, shortlist

#: Ids that run against each other within the second heat, see `race`.
BLOCK = 256

# SplitMix64 (see `sampling.uniform`) in signed numbers, which torch multiplies modulo 2**64.
_GOLDEN, _FIRST, _SECOND = (word - (1 << 64) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def draw_free(scores: torch.Tensor, wishes: Wishes) -> torch.Tensor:
    """[n] ids drawn from rows of scores [n, V] without a filter."""
    return race(_weights(scores, wishes.temperature), wishes.uniform)


def draw_filtered(scores: torch.Tensor, wishes: Wishes) -> torch.Tensor:
    """[n] ids drawn from what top_k, top_p and min_p leave of rows of scores [n, V].

    On a CPU most rows are drawn from their few best scores. A GPU sorts everything, which costs less than to wait until
    the host knows which rows can do without.
    """
    if scores.device.type != "cpu":
        return _draw_above(scores, cuts(scores, wishes), wishes)
    values, ids, cut = shortlist(scores, wishes)
    drawn = _draw_listed(values, ids, cut, wishes, scores.shape[1])
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
    return race(weights, wishes.uniform)


def _draw_listed(
    values: torch.Tensor, ids: torch.Tensor, cut: torch.Tensor, wishes: Wishes, vocab: int
) -> torch.Tensor:
    """Draw from lists of scores and their ids [n, K] that hold all scores above their cuts [n]: the race that `race`
    runs, with everybody else left out.
    """
    scaled = (values.double() - values.amax(-1, keepdim=True)) / wishes.temperature[:, None]
    weights = torch.where(values >= cut[:, None], scaled.exp(), 0.0)
    blocks = ids // BLOCK
    totals = weights.new_zeros(len(ids), -(-vocab // BLOCK)).scatter_add_(1, blocks, weights)
    inside = torch.where(blocks == _first_block(totals, wishes.uniform)[:, None], weights, 0.0)
    return ids.gather(1, _first(times(wishes.uniform, ids), inside)[:, None])[:, 0]


def _weights(scores: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """The softmax of scores [n, V] / temperature [n], padded with zeros to whole blocks."""
    width = scores.shape[1]
    scaled = scores.new_empty(len(scores), -(-width // BLOCK) * BLOCK)
    scaled[:, width:] = -torch.inf
    torch.div(scores, temperature.float()[:, None], out=scaled[:, :width])
    return F.softmax(scaled, -1)


def race(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """One id of each row, drawn in proportion to its weight.

    In two heats: blocks of BLOCK ids, with the sums of their weights, then the ids of the block that won. The
    distribution is the same, and few times are needed. An id without weight never wins.

    Args:
        weights: [n, k * BLOCK], at least 0, not all of a row 0. Any scale.
        uniforms: [n] float64 in [0, 1).

    Returns:
        [n] int64.
    """
    blocks = weights.view(len(weights), -1, BLOCK)
    block = _first_block(blocks.sum(-1).double(), uniforms)
    ids = block[:, None] * BLOCK + torch.arange(BLOCK, device=weights.device)
    inside = blocks.gather(1, block[:, None, None].expand(-1, 1, BLOCK))[:, 0].double()
    return ids.gather(1, _first(times(uniforms, ids), inside)[:, None])[:, 0]


def _first_block(totals: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The first heat: [n] the block that wins, from the weights [n, k] of all blocks."""
    numbers = torch.arange(totals.shape[1], device=totals.device)
    return _first(times(uniforms, -1 - numbers), totals)  # below 0, where there are no ids


def times(uniforms: torch.Tensor, runners: torch.Tensor) -> torch.Tensor:
    """[n, k] exponentially distributed float64 numbers, each a function of its row's number and its runner.

    Args:
        uniforms: [n] float64 in [0, 1), multiples of 2**-53.
        runners: [k] or [n, k] int64.
    """
    words = (uniforms * 2.0**53).long()[:, None] + runners * _GOLDEN
    words = (words ^ _shift(words, 30)) * _FIRST
    words = (words ^ _shift(words, 27)) * _SECOND
    bits = _shift(words ^ _shift(words, 31), 11)
    return -((bits + 1).double() * 2.0**-53).log()


def _shift(words: torch.Tensor, places: int) -> torch.Tensor:
    """To the right, filling with zeros: torch fills with the sign."""
    return (words >> places) & ((1 << (64 - places)) - 1)


def _first(runs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[n] place of the runner in each row [n, k] whose time divided by its weight is the shortest."""
    return torch.where(weights > 0, runs / weights, torch.inf).argmin(-1)
