"""This module owns the log-probabilities that clients are told.

They are the raw model's, before biases, penalties, temperature and filters: the log-softmax of its scores, in float32,
over the ids that can be chosen (padding left out), never below `LOWEST`, so that no client gets minus infinity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from radixlm.base.plan import TokenScores
from radixlm.base.request import LogprobParams
from radixlm.device.base import Device
from radixlm.sampling import rank

LOWEST = -9999.0

#: Bytes of float32 scores that exist at once. A long prompt is scored in parts of this size.
PART_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """Scores of n tokens on the device: `chosen` [n], `top_ids`, `top` [n, k], `picked` [n, p]. NaN: not finite."""

    chosen: torch.Tensor
    top_ids: torch.Tensor
    top: torch.Tensor
    picked: torch.Tensor

    def tensors(self) -> list[torch.Tensor]:
        return [self.chosen, self.top_ids, self.top, self.picked]


class Scorer:
    """
    Args:
        vocab_size: ids from here on are padding and have no probability.
    """

    def __init__(self, vocab_size: int, device: Device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self.part = max(1, PART_BYTES // (4 * vocab_size))

    def score(
        self,
        logits: Callable[[int, int], torch.Tensor],
        tokens: torch.Tensor,
        asked: Sequence[LogprobParams],
    ) -> Scored:
        """Scores of n tokens.

        Args:
            logits: (start, stop) -> scores [stop - start, at least vocab_size] for `tokens[start:stop]`.
            tokens: [n] int64, the ids that are there.
            asked: what each token's row wants, or a single entry for all. The widest wish sets the width for all;
                `take` cuts each row's own part.
        """
        top = min(max(params.top for params in asked), self._vocab_size)
        width = max(len(params.token_ids) for params in asked)
        wanted = np.full((len(asked), width), self._vocab_size, np.int64)
        for i, params in enumerate(asked):
            wanted[i, : len(params.token_ids)] = params.token_ids
        wanted_ids = self._device.upload(wanted).expand(len(tokens), width)
        parts = [
            self._part(logits(start, stop), tokens[start:stop], top, wanted_ids[start:stop])
            for start, stop in self._ranges(len(tokens))
        ]
        if len(parts) == 1:
            return parts[0]
        return Scored(*(torch.cat(tensors) for tensors in zip(*(part.tensors() for part in parts), strict=True)))

    def _ranges(self, count: int) -> Iterator[tuple[int, int]]:
        for start in range(0, max(count, 1), self.part):
            yield start, min(start + self.part, count)

    def _part(self, logits: torch.Tensor, tokens: torch.Tensor, top: int, wanted: torch.Tensor) -> Scored:
        scores = logits[:, : self._vocab_size].float()
        raw = scores.log_softmax(-1).clamp(min=LOWEST)
        # Ranked by score: scores that differ may round to equal log-probabilities, and the best must stay the best.
        _, ids = rank.ranked(scores, top)
        picked = raw.gather(1, wanted.clamp(max=self._vocab_size - 1))
        picked = torch.where(wanted < self._vocab_size, picked, LOWEST)
        chosen = raw.gather(1, tokens.clamp(max=self._vocab_size - 1)[:, None])[:, 0]
        chosen = torch.where((tokens < self._vocab_size) | chosen.isnan(), chosen, LOWEST)
        return Scored(chosen, ids, raw.gather(1, ids), picked)


def take(arrived: Sequence[torch.Tensor], where: slice, position: int, asked: LogprobParams) -> TokenScores | None:
    """One row's part of `Scored.tensors` that have reached the host, or None if its scores are not finite."""
    chosen, top_ids, top, picked = (tensor[where] for tensor in arrived)
    if chosen.isnan().any():
        return None
    return TokenScores(
        position=position,
        chosen=chosen.numpy(),
        top_ids=top_ids[:, : asked.top].numpy().astype(np.int32),
        top=top[:, : asked.top].numpy(),
        picked=picked[:, : len(asked.token_ids)].numpy(),
    )
