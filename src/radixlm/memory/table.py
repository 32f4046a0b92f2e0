"""This module owns the device's row tables: the token at each position of a row, and the page each position is in."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from radixlm.base.plan import Plan
from radixlm.device.base import Device

Index = npt.NDArray[np.int64]


class RowTables:
    """`tokens` [rows, columns] and `pages` [rows, pages per row], int32, changed by plans and by sampled tokens alone.

    There is one column more than the context is long: the token after the last position may still be sampled. The
    tables start as untouched zeros, which cost no memory on a CPU until a row uses them.
    """

    def __init__(self, rows: int, context_length: int, page_size: int, device: Device) -> None:
        self.rows = rows
        self.page_size = page_size
        self.columns = context_length + 1
        self.pages_per_row = -(-self.columns // page_size)
        where = device.torch_device
        self.tokens = torch.zeros(rows, self.columns, dtype=torch.int32, device=where)
        self.pages = torch.zeros(rows, self.pages_per_row, dtype=torch.int32, device=where)
        self._flat_tokens = self.tokens.view(-1)
        self._flat_pages = self.pages.view(-1)
        self._device = device

    def apply(self, plan: Plan) -> None:
        """Take in the plan's joins, then its page writes, in order, and its token writes."""
        for join in plan.joins:
            self.tokens[join.row, : len(join.tokens)] = self._device.upload(join.tokens)
            if len(join.pages):
                self.pages[join.row, : len(join.pages)] = self._device.upload(join.pages)
        if len(plan.page_ids):
            where, pages = self._writes(plan)
            self._flat_pages.index_copy_(0, self._device.upload(where), self._device.upload(pages))
        if len(plan.token_ids):
            places = self.token_places(plan.token_rows.astype(np.int64), plan.token_positions.astype(np.int64))
            self.write_tokens(self._device.upload(places), self._device.upload(plan.token_ids))

    def _writes(self, plan: Plan) -> tuple[Index, npt.NDArray[np.int32]]:
        """Flat places and pages. The device may write in any order, so of writes to one place only the last is kept."""
        where = plan.page_rows.astype(np.int64) * self.pages_per_row + plan.page_index
        pages = plan.page_ids.astype(np.int32)
        unique, newest = np.unique(where[::-1], return_index=True)
        return (where, pages) if len(unique) == len(where) else (unique, pages[::-1][newest])

    def token_places(self, rows: Index, positions: Index) -> Index:
        """Flat places in the token table, for `read_tokens` and `write_tokens`."""
        return rows * self.columns + positions

    def page_places(self, rows: Index, positions: Index) -> Index:
        """Flat places in the page table of the pages that hold these positions, for `read_pages`."""
        return rows * self.pages_per_row + positions // self.page_size

    def read_tokens(self, places: torch.Tensor) -> torch.Tensor:
        """Token ids [n] int64 at flat places [n]."""
        return self._flat_tokens.index_select(0, places).long()

    def read_pages(self, places: torch.Tensor) -> torch.Tensor:
        """Page ids [n] int64 at flat places [n]."""
        return self._flat_pages.index_select(0, places).long()

    def write_tokens(self, places: torch.Tensor, tokens: torch.Tensor) -> None:
        """Store sampled tokens [n] at flat places [n], which are distinct."""
        self._flat_tokens.index_copy_(0, places, tokens.to(torch.int32))
