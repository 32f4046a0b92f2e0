"""This module owns how a plan and the row tables become `StepInputs`: index arithmetic on the host, and one upload."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from radixlm.attention.base import SharedTiles, StepInputs
from radixlm.attention.tiles import Tiling
from radixlm.base.plan import Plan
from radixlm.device.base import Device
from radixlm.memory.table import RowTables

Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class _Steady:
    """What a decode step shares with the one before it: the same rows, in the same order."""

    plan: Plan
    rows: Index
    lengths: list[int]
    device_rows: torch.Tensor
    select: torch.Tensor
    shared: SharedTiles | None

    def goes_on(self, plan: Plan) -> bool:
        before = self.plan
        return before.rows is plan.rows and before.samples is plan.samples and before.shared is plan.shared


class InputBuilder:
    """
    Args:
        tiling: how shared prefixes are cut; None if the attention makes no use of them.
    """

    def __init__(self, tables: RowTables, device: Device, tiling: Tiling | None = None) -> None:
        self._tables = tables
        self._device = device
        self._tiling = tiling
        self._steady: _Steady | None = None

    def build(self, plan: Plan) -> StepInputs:
        """The step as the device sees it. The plan has been applied to the tables."""
        if plan.decode:
            return self._decode(plan)
        rows, starts, lengths = (array.astype(np.int64) for array in (plan.rows, plan.starts, plan.lengths))
        ends = lengths.cumsum()
        token_rows = rows.repeat(lengths)
        positions = np.arange(ends[-1]) + (starts + lengths - ends).repeat(lengths)
        select = ends[plan.samples] - 1
        return self._inputs(plan, token_rows, positions, lengths.tolist(), (rows, select), self._shared(plan))

    def _decode(self, plan: Plan) -> StepInputs:
        positions = plan.starts.astype(np.int64)
        steady = self._steady
        # The planner hands out the same arrays as long as nobody joins or leaves.
        if steady is not None and steady.goes_on(plan):
            return self._inputs(plan, steady.rows, positions, steady.lengths, (), steady.shared, steady)
        rows = plan.rows.astype(np.int64)
        shared = self._shared(plan)
        inputs = self._inputs(plan, rows, positions, [1] * len(rows), (rows, np.flatnonzero(plan.samples)), shared)
        self._steady = _Steady(plan, rows, [1] * len(rows), inputs.rows, inputs.select, shared)
        return inputs

    def _shared(self, plan: Plan) -> SharedTiles | None:
        if self._tiling is None or not plan.shared:
            return None
        spans = plan.decodes
        return self._tiling.tiles(self._device.upload(self._tiling.numbers(plan.shared, spans)), spans)

    def _inputs(
        self,
        plan: Plan,
        token_rows: Index,
        positions: Index,
        lengths: list[int],
        more: tuple[Index, ...],
        shared: SharedTiles | None = None,
        steady: _Steady | None = None,
    ) -> StepInputs:
        """Upload and gather. `more`: rows and select, unless `steady` has them on the device."""
        tables, page_size = self._tables, self._tables.page_size
        token_places = tables.token_places(token_rows, positions)
        page_places = tables.page_places(token_rows, positions)
        arrays = (positions, token_places, page_places, *more)
        parts = torch.split(self._device.upload(np.concatenate(arrays)), [len(array) for array in arrays])
        on_device, at_tokens, at_pages = parts[:3]
        rows, select = (steady.device_rows, steady.select) if steady is not None else parts[3:]
        slots = tables.read_pages(at_pages)
        if page_size > 1:
            slots = slots * page_size + on_device % page_size
        return StepInputs(
            ids=tables.read_tokens(at_tokens),
            positions=on_device,
            slots=slots,
            rows=rows,
            row_ids=plan.rows.tolist(),
            starts=plan.starts.tolist(),
            lengths=lengths,
            page_table=tables.pages,
            page_size=page_size,
            select=select,
            decode=plan.decode,
            shared=shared,
        )
