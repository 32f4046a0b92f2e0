"""This module owns the changes to a row's scores before a token is chosen: masks, biases, minimum length, penalties.

They are applied in this order, each to float32 scores [n, V] in place. All but masks are a gather or scatter at the ids
that are concerned: they do not pass over the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from radixlm.base.plan import Ints
from radixlm.device.base import Device
from radixlm.sampling.table import Batch, Need

#: Index in the batch -> the ids that are allowed, as bits: id i is bit i % 32 of word i // 32.
Masks = Mapping[int, Ints]


class Adjuster:
    """Holds the token table [rows, columns], from which penalties count."""

    def __init__(self, tokens: torch.Tensor, device: Device) -> None:
        self._tokens = tokens
        self._device = device
        self._counts = torch.zeros(0, dtype=torch.float32, device=device.torch_device)  # all zero between calls

    def apply(self, scores: torch.Tensor, batch: Batch, masks: Masks) -> None:
        """Change `scores` [n, V], contiguous, whose rows are the batch's."""
        if masks:
            self._mask(scores, masks)
        if batch.needs & Need.BIAS:
            self._bias(scores, batch)
        if batch.needs & Need.MINIMUM:
            self._forbid_endings(scores, batch)
        if batch.needs & Need.PENALTY:
            self._penalise(scores, batch)

    def _mask(self, scores: torch.Tensor, masks: Masks) -> None:
        width = scores.shape[1]
        for index, words in masks.items():
            bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), bitorder="little", count=width)
            scores[index].masked_fill_(self._device.upload(bits == 0), -torch.inf)

    def _bias(self, scores: torch.Tensor, batch: Batch) -> None:
        lists = [(i, batch.table.lists[batch.rows[i]]) for i in batch.having(Need.BIAS).tolist()]
        places = np.concatenate([i * scores.shape[1] + row.bias_ids for i, row in lists])
        bias = np.concatenate([row.bias for _, row in lists])
        scores.view(-1).index_add_(0, self._device.upload(places), self._device.upload(bias))

    def _forbid_endings(self, scores: torch.Tensor, batch: Batch) -> None:
        width = scores.shape[1]
        rows = batch.having(Need.MINIMUM).tolist()
        places = np.concatenate([i * width + batch.table.lists[batch.rows[i]].ending_ids for i in rows])
        scores.view(-1).index_fill_(0, self._device.upload(places), -torch.inf)

    def _penalise(self, scores: torch.Tensor, batch: Batch) -> None:
        """Repetition penalty, then frequency and presence penalties.

        With c[j] the number of times that id j stands in the output: a score x[j] of an id in the prompt or the output
        becomes x[j] / r if it is above 0, else x[j] * r (Keskar et al., "CTRL", 2019); then c[j] * frequency and, if
        c[j] > 0, presence are taken off (the formula in OpenAI's API reference).

        An id that occurs several times is read and written several times, with the same result each time.
        """
        table, index = batch.table, batch.having(Need.PENALTY)
        rows, known = batch.rows[index], batch.positions[index]
        upload = self._device.upload
        figures = np.stack((table.repetition[rows], table.frequency[rows], table.presence[rows]), 1)
        repetition, frequency, presence = upload(figures.astype(np.float32)).unsqueeze(1).unbind(-1)
        bounds = upload(np.stack((index, table.prompt_len[rows], known), 1)).unsqueeze(1)
        ours, prompt_len, length = bounds.unbind(-1)  # each [m, 1]

        ids = self._tokens[upload(rows), : int(known.max())].long()
        positions = torch.arange(ids.shape[1], device=ids.device)
        ids = torch.where(positions < length, ids, ids[:, :1])  # past the end: the first token again, which counts once
        generated = (positions >= prompt_len) & (positions < length)

        counts = self._cleared(len(index) * scores.shape[1])
        count_at = torch.arange(len(index), device=ids.device)[:, None] * scores.shape[1] + ids
        counts.scatter_add_(0, count_at.view(-1), generated.float().view(-1))
        count = counts[count_at]
        counts.index_fill_(0, count_at.view(-1), 0.0)

        flat, score_at = scores.view(-1), ours * scores.shape[1] + ids
        x = flat[score_at]
        x = torch.where(x > 0, x / repetition, x * repetition)
        x = x - count * frequency - (count > 0) * presence
        flat.scatter_(0, score_at.view(-1), x.view(-1))

    def _cleared(self, size: int) -> torch.Tensor:
        if len(self._counts) < size:
            self._counts = torch.zeros(size, dtype=torch.float32, device=self._counts.device)
        return self._counts[:size]
