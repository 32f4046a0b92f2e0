"""This module owns how groups of rows that share a prefix become `SharedTiles`: pieces of about equal work, in arrays
whose shape depends on the batch size alone, so that a captured graph can read them.

Only integers here; the arithmetic is in the backends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from radixlm.attention.base import LayerSpec, SharedTiles
from radixlm.base.plan import SharedPrefix

#: Query rows (rows of the batch times query heads of a key head) of a tile: what one program multiplies at once.
TILE = 64
#: A tile has room for this many rows of the batch at least. With 3 or more, tiles are at most half as many as rows.
LEAST_ROWS = 4
#: Programs per multiprocessor that fill a GPU.
OVERLAP = 2
#: Positions: pieces are multiples of the first, and at least the second unless the prefix is shorter.
BLOCK, LEAST_PIECE = 64, 256


@dataclass(frozen=True, slots=True)
class Tiling:
    """How prefixes are cut for one model on one device.

    A batch of B rows has at most B // 2 tiles (a group has two rows or more) and B // 2 + `fill` pieces.

    Attributes:
        rows: most rows of a tile.
        fill: pieces that fill the device; all prefixes together are cut into about as many.
    """

    rows: int
    fill: int

    @staticmethod
    def of(layers: Sequence[LayerSpec], processors: int) -> Tiling | None:
        """For a model's layers on a device of so many processors. None if every layer has a window: those share
        nothing.
        """
        whole = [spec for spec in layers if not spec.window]
        if not whole:
            return None
        group = max(spec.heads // spec.kv_heads for spec in whole)
        return Tiling(
            rows=max(LEAST_ROWS, TILE // (1 << (group - 1).bit_length())),
            fill=-(-OVERLAP * processors // min(spec.kv_heads for spec in whole)),
        )

    def pieces(self, spans: int) -> int:
        """Most pieces of a step with so many spans."""
        return spans // 2 + self.fill

    def size(self, spans: int) -> int:
        """Integers that describe a step with so many spans."""
        return self.pieces(spans) * (self.rows + 3) + spans * 4

    def numbers(self, groups: Sequence[SharedPrefix], spans: int) -> npt.NDArray[np.int32]:
        """The description [size] of these groups, for `tiles`. Spans beyond the plan's share nothing."""
        most = self.pieces(spans)
        flat = np.zeros(self.size(spans), np.int32)
        members, shares, pieces = np.split(flat, np.cumsum([most * self.rows, spans * 4]))
        members, shares, pieces = members.reshape(most, -1), shares.reshape(spans, 4), pieces.reshape(most, 3)
        members[:] = -1
        tiles = [
            (tile, group.length)
            for group in groups
            for tile in np.array_split(group.spans, -(-len(group.spans) // self.rows))
        ]
        longest = max(_whole(-(-sum(length for _, length in tiles) // self.fill)), LEAST_PIECE)
        at = number = 0
        # Long ones first, so that the last programs to start are short.
        for tile, length in sorted(tiles, key=lambda tile: -tile[1]):
            each = _whole(-(-length // -(-length // longest)))
            begins = np.arange(0, length, each)
            count, rows = len(begins), len(tile)
            here = pieces[at : at + count]
            here[:, 0], here[:, 1] = begins, np.minimum(begins + each, length)
            here[:, 2] = np.arange(number, number + count * rows, rows)
            members[at : at + count, :rows] = tile
            shares[tile, 0], shares[tile, 1] = length, np.arange(number, number + rows)
            shares[tile, 2], shares[tile, 3] = count, rows
            at += count
            number += count * rows
        return flat

    def tiles(self, numbers: torch.Tensor, spans: int) -> SharedTiles:
        """Views of a description [size] on the device."""
        most = self.pieces(spans)
        members, shares, pieces = torch.split(numbers, [most * self.rows, spans * 4, most * 3])
        partials = spans + self.fill * self.rows  # one of each span, and of each row of a piece beyond its tile's first
        return SharedTiles(members.view(most, self.rows), pieces.view(most, 3), shares.view(spans, 4), partials)


def _whole(positions: int) -> int:
    """Rounded up to whole blocks."""
    return -(-positions // BLOCK) * BLOCK
