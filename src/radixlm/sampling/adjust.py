"""This module owns the changes to a row's scores before a token is chosen: masks, biases, minimum length, penalties.

They are applied in this order, each to float32 scores [n, V] in place. All but masks are a gather or scatter at the ids
that are concerned: they do not pass over the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
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

    def adjusted(self, scores: torch.Tensor, batch: Batch, masks: Masks) -> torch.Tensor:
        """The scores [n, V] that tokens are chosen by, from those of the model, which stay as they are."""
        count, width = scores.shape
        # One row more than there are: what is written to ids that do not exist goes there.
        spacious = torch.empty(count + 1, width, dtype=torch.float32, device=scores.device)
        result = spacious[:count].copy_(scores)
        if masks:
            self._mask(result, masks)
        if batch.needs & Need.BIAS:
            self._bias(result, batch)
        if batch.needs & Need.MINIMUM:
            self._forbid_endings(result, batch)
        if batch.needs & Need.PENALTY:
            self._penalise(spacious, batch)
        return result

    def _mask(self, scores: torch.Tensor, masks: Masks) -> None:
        rows = sorted(masks)
        forbidden = self._forbidden(np.stack([masks[index] for index in rows]), scores.shape[1])
        if len(rows) == len(scores):
            scores.masked_fill_(forbidden, -torch.inf)
            return
        where = self._device.upload(np.array(rows, np.int64))
        scores.index_copy_(0, where, scores.index_select(0, where).masked_fill_(forbidden, -torch.inf))

    def _forbidden(self, words: npt.NDArray[np.int32], width: int) -> torch.Tensor:
        """[m, width] bool from the bits of allowed ids [m, words]. A GPU gets the bits as they are."""
        if self._device.kind == "cpu":
            bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little", count=width)
            return self._device.upload(bits == 0)
        packed = self._device.upload(words)
        places = torch.arange(32, dtype=torch.int32, device=packed.device)
        return ((packed[:, :, None] >> places) & 1).view(len(words), -1)[:, :width] == 0

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

    def _penalise(self, spacious: torch.Tensor, batch: Batch) -> None:
        """Repetition penalty, then frequency and presence penalties.

        With c[j] the number of times that id j stands in the output: a score x[j] of an id in the prompt or the output
        becomes x[j] / r if it is above 0, else x[j] * r (Keskar et al., "CTRL", 2019); then c[j] * frequency and, if
        c[j] > 0, presence are taken off (the formula in OpenAI's API reference).

        An id that occurs several times is read and written several times, with the same result each time.
        """
        table, index = batch.table, batch.having(Need.PENALTY)
        rows, known, width = batch.rows[index], batch.positions[index], spacious.shape[1]
        repetition, frequency, presence = (
            self._device.upload(column[rows].astype(np.float32))[:, None]
            for column in (table.repetition, table.frequency, table.presence)
        )
        # Without a repetition penalty nothing of the prompt counts.
        start = 0 if (table.repetition[rows] != 1.0).any() else int(table.prompt_len[rows].min())
        stop = int(known.max())
        bounds = np.stack((index, table.prompt_len[rows], known))
        ours, prompt_len, length = self._device.upload(bounds)[:, :, None].unbind(0)

        ids = self._tokens[:, start:stop].index_select(0, self._device.upload(rows)).long()
        positions = torch.arange(start, stop, device=ids.device)
        real = (positions < length) & (ids < width)
        places = torch.where(real, ours * width + ids, (len(spacious) - 1) * width)
        scores = spacious.view(-1)
        x = scores.take(places)
        x = torch.where(x > 0, x / repetition, x * repetition)
        if (table.frequency[rows] != 0.0).any() or (table.presence[rows] != 0.0).any():
            count = self._count(places, positions >= prompt_len, spacious.numel())
            x = x - count * frequency - (count > 0) * presence
        scores.scatter_(0, places.view(-1), x.view(-1))

    def _count(self, places: torch.Tensor, counted: torch.Tensor, size: int) -> torch.Tensor:
        """How often each place [m, L] occurs among those that are counted."""
        if len(self._counts) < size:
            self._counts = torch.zeros(size, dtype=torch.float32, device=places.device)
        flat = places.view(-1)
        self._counts.scatter_add_(0, flat, counted.float().view(-1))
        count = self._counts.take(places)
        self._counts.index_fill_(0, flat, 0.0)
        return count
