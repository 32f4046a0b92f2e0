"""This module owns finding the largest scores of a row: the best, the k best, the k best in an order that is unique."""

from __future__ import annotations

import numpy as np
import torch

#: Columns folded into one before the k best are looked for, see `largest`.
FOLD = 16


def best(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest value of each row of [n, V] and its id, the lowest of equal ones. A row with a NaN gives NaN."""
    if scores.device.type != "cpu":
        values, ids = scores.max(-1)
        return values, ids
    # numpy's argmax of a contiguous row uses vector instructions and is many times faster than torch's.
    rows = scores.numpy()
    if rows.flags.c_contiguous:
        found = rows.argmax(-1)
    else:
        found = np.fromiter((row.argmax() for row in rows), np.int64, len(rows))
    ids = torch.from_numpy(found)
    return scores.gather(1, ids[:, None])[:, 0], ids


def largest(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest values of each row of [n, V], in falling order, and their ids. Which of equal values is open.

    On a CPU a row is first folded to V / FOLD maxima in one pass at the speed of memory: the k largest values of a row
    lie in the k columns whose maxima are largest, so that only k * FOLD candidates are left to rank.
    """
    count, width = scores.shape
    columns = width // FOLD
    if scores.device.type != "cpu" or columns < 4 * k:
        values, ids = scores.topk(min(k, width), -1)
        return values, ids
    folded = columns * FOLD
    tops = scores[:, :folded].unfold(1, columns, columns).amax(1).topk(k, -1, sorted=False).indices
    offsets = torch.arange(0, folded, columns)[None, :, None]
    candidates = (tops[:, None, :] + offsets).flatten(1)
    rest = torch.arange(folded, width).expand(count, -1)
    candidates = torch.cat((candidates, rest), 1)
    values, chosen = scores.gather(1, candidates).topk(k, -1)
    return values, candidates.gather(1, chosen)


def ranked(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k best of each row of [n, V] and their ids: larger first, of equal ones the lower id first.

    The order is unique, so the answer for a smaller k is the beginning of the answer for a larger one.
    """
    width = scores.shape[1]
    k = min(k, width)
    if scores.device.type != "cpu" or k == width:
        values, ids = scores.sort(stable=True, dim=-1, descending=True)
        return values[:, :k], ids[:, :k]
    values, ids = largest(scores, k + 1)
    tied = values[:, k] == values[:, k - 1]
    values, ids = values[:, :k], ids[:, :k]
    for row in tied.nonzero()[:, 0].tolist() if k else ():
        # Equal values on both sides of the cut: take those with the lowest ids.
        cut = values[row, -1]
        above = int((values[row] > cut).sum())
        ids[row, above:] = torch.from_numpy(np.flatnonzero(scores[row].numpy() == cut.item())[: k - above])
    order = ids.argsort(-1)
    values, ids = values.gather(1, order), ids.gather(1, order)
    order = values.argsort(stable=True, dim=-1, descending=True)
    return values.gather(1, order), ids.gather(1, order)


def falling(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The k largest values of each row of [n, V], largest first; for any k, where `largest` is for small ones."""
    width = scores.shape[1]
    if scores.device.type != "cpu":
        return scores.sort(-1, descending=True).values[:, :k]
    # numpy selects and sorts float32 with vector instructions, several times faster than torch.
    rows = scores.numpy()
    if k < width:
        rows = np.partition(rows, width - k, axis=-1)[:, width - k :]
    return torch.from_numpy(np.sort(rows, axis=-1)[:, ::-1].copy())
