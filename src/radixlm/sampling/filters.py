"""This module owns which tokens may be drawn: the score below which top_k, top_p and min_p cut a row.

What is kept does not depend on how equal scores happen to be sorted:

    top_k   a token is kept if fewer than top_k tokens have a larger score
    top_p   a token is kept if the tokens with a larger score have together less than top_p of the mass of the top_k
    min_p   a token is kept if its probability is at least min_p times that of the best

so tokens that tie with the last one kept are kept too. Probabilities are those after temperature. Each filter keeps all
scores from some value on, hence a row has one cut: the largest of the three. top_k comes before top_p as it does in
transformers and vLLM. Where min_p stands makes no difference: it compares with the best token, which is always kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from radixlm.sampling import rank

#: Best scores of a row looked at first; rows that are cut further down are looked at again with more, then with all.
CANDIDATES, MORE_CANDIDATES = 128, 4096


@dataclass(frozen=True, slots=True, eq=False)
class Wishes:
    """How n rows are drawn, each [n] float64. A `top_k` of the vocabulary's size keeps all; `uniform` is in [0, 1)."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    uniform: torch.Tensor

    def take(self, index: torch.Tensor) -> Wishes:
        columns = (self.temperature, self.top_k, self.top_p, self.min_p, self.uniform)
        return Wishes(*(column[index] for column in columns))


def cuts(scores: torch.Tensor, wishes: Wishes) -> torch.Tensor:
    """The smallest score that each row of [n, V] float32 keeps, [n] float32, from all scores in order."""
    vocab = scores.shape[1]
    return _cut(rank.falling(scores, vocab), vocab, wishes, None)[0]


def shortlist(scores: torch.Tensor, wishes: Wishes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same without sorting a vocabulary, as far as possible.

    Returns:
        The K best scores of each row [n, K], largest first, their ids [n, K], and the cut [n], which may be below them.
    """
    vocab = scores.shape[1]
    values, ids = rank.largest(scores, CANDIDATES)
    mass = torch.ones_like(wishes.temperature)
    rows = ((wishes.top_p < 1.0) & (wishes.top_k >= vocab)).nonzero()[:, 0]
    if len(rows):
        mass[rows] = _mass(scores.index_select(0, rows), wishes.temperature[rows])
    cut, below = _cut(values, vocab, wishes, mass)
    for count in (MORE_CANDIDATES, vocab):
        rows = below.nonzero()[:, 0]
        if len(rows):
            best = rank.falling(scores.index_select(0, rows), min(count, vocab))
            cut[rows], below[rows] = _cut(best, vocab, wishes.take(rows), mass[rows])
    return values, ids, cut


def _mass(scores: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """[n] float64: the sum of exp((score - maximum) / temperature) over each row of [n, V]."""
    weights = F.softmax(scores / temperature.float()[:, None], -1)
    return 1.0 / weights.amax(-1).double()  # before the division by the sum, the maximum's weight was 1


def _cut(
    best: torch.Tensor, vocab: int, filters: Wishes, mass: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cuts from the K best of `vocab` scores.

    Args:
        best: [n, K], largest first.
        mass: [n] of all scores, see `_mass`; None if these are all.

    Returns:
        The cuts [n], and which rows [n] need one below all of these scores, which theirs is then not.
    """
    count = best.shape[1]
    scaled = (best - best[:, :1]) / filters.temperature.float()[:, None]
    running = scaled.exp_().cumsum(-1, dtype=torch.float64)
    if mass is None or count == vocab:
        mass = running[:, -1]

    in_reach = filters.top_k <= count
    between = ~in_reach & (filters.top_k < vocab)  # the top_k end somewhere below the K best
    kth = (filters.top_k.long().clamp(max=count) - 1)[:, None]
    by_count = torch.where(in_reach, best.gather(1, kth)[:, 0], -torch.inf)

    limited = filters.top_p < 1.0
    kept_mass = torch.where(in_reach, running.gather(1, kth)[:, 0], mass)
    reached = (running < (filters.top_p * kept_mass)[:, None]).sum(-1)
    by_mass = torch.where(limited, best.gather(1, reached.clamp(max=count - 1)[:, None])[:, 0], -torch.inf)

    # log(0) is -inf, which cuts nothing.
    by_best = (best[:, 0].double() + filters.temperature * filters.min_p.log()).float()

    cut = torch.maximum(torch.maximum(by_count, by_mass), by_best)
    if count == vocab:
        return cut, torch.zeros_like(limited)
    # Without its exact mass `between` spoils top_p; else only a cut by min_p above the K best makes up for their end.
    below = (between | (limited & (reached >= count))) & (by_best <= best[:, -1])
    return cut, below | (between & limited)
