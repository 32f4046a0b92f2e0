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

from radixlm.sampling import rank

#: Best scores of a row looked at first; rows that are cut further down are looked at again with more, then with all.
CANDIDATES, MORE_CANDIDATES = 128, 4096


@dataclass(frozen=True, slots=True, eq=False)
class Filters:
    """Parameters of n rows, float64 [n] each (`top_k` too: it is a count up to the vocabulary's size, meaning all)."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor

    def take(self, index: torch.Tensor) -> Filters:
        return Filters(self.temperature[index], self.top_k[index], self.top_p[index], self.min_p[index])


def cuts(scores: torch.Tensor, best: torch.Tensor, mass: torch.Tensor, filters: Filters) -> torch.Tensor:
    """The smallest score that each row keeps.

    Args:
        scores: [n, V] float32, before temperature, finite maxima.
        best: [n, K] the K best of them, largest first.
        mass: [n] float64, the sum of exp((score - maximum) / temperature) over the row, used where top_k keeps all.

    Returns:
        [n] float32.
    """
    vocab = scores.shape[1]
    cut, below = _cut(best, vocab, mass, filters)
    if best.shape[1] == vocab:
        return cut
    for count in (MORE_CANDIDATES, vocab):
        rows = below.nonzero()[:, 0]
        if len(rows):
            again = rank.falling(scores[rows], min(count, vocab))
            cut[rows], below[rows] = _cut(again, vocab, mass[rows], filters.take(rows))
    return cut


def _cut(best: torch.Tensor, vocab: int, mass: torch.Tensor, filters: Filters) -> tuple[torch.Tensor, torch.Tensor]:
    """Cuts from the K best of `vocab` scores [n, K], best first, and which rows [n] may need a cut below them all."""
    count = best.shape[1]
    scaled = (best - best[:, :1]) / filters.temperature.float()[:, None]
    running = scaled.exp_().cumsum(-1, dtype=torch.float64)
    if count == vocab:
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
