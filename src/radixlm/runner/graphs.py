"""This module owns decode steps captured as CUDA graphs: the whole step, from the row tables to the next tokens, in one
launch.

A graph reads rows and positions from fixed buffers and moves the positions on by itself, so a steady decode uploads
nothing. Batches are padded to the sizes below with a spare row, whose keys and values go to a spare page.

A size is captured twice if need be: without the kernels of shared prefixes, and with them. The latter reads the groups
from a buffer of its own, which has room for the most pieces that the size can have (see `attention.tiles.Tiling`; the
programs of those that are not there end at once) and is filled when a plan brings other groups than the last one.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from radixlm.attention.base import AttentionBackend, SharedTiles, Step, StepInputs
from radixlm.attention.tiles import Tiling
from radixlm.base.plan import Ints, Plan, SharedPrefix
from radixlm.device.base import Device
from radixlm.memory.pool import KVPool
from radixlm.memory.table import RowTables
from radixlm.models.base import Model
from radixlm.sampling.sampler import Sampled, Sampler

#: Batch sizes that are captured, each when it is first needed.
SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, *range(80, 257, 16), *range(288, 513, 32), *range(576, 1025, 64))


@dataclass(frozen=True, slots=True, eq=False)
class Replayed:
    """Logits [n, vocab] and the most probable tokens of a step. Valid until the next replay."""

    logits: torch.Tensor
    best: Sampled


@dataclass(slots=True, eq=False)
class _Captured:
    """One graph. `groups` is what its buffer `numbers` describes."""

    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor
    best: Sampled
    numbers: torch.Tensor | None
    groups: tuple[SharedPrefix, ...] = ()


class DecodeGraphs:
    """
    Args:
        tables: with one row more than sequences may use, the last one.
        pool: with one page more than the cache hands out, the last one.
        tiling: how shared prefixes are cut; None if the attention makes no use of them.
    """

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        attention: AttentionBackend,
        tables: RowTables,
        sampler: Sampler,
        device: Device,
        tiling: Tiling | None = None,
    ) -> None:
        self._model = model
        self._pool = pool
        self._attention = attention
        self._tables = tables
        self._sampler = sampler
        self._device = device
        self._tiling = tiling
        self._spare_row = tables.rows - 1
        tables.pages[self._spare_row] = pool.pages - 1
        self._sizes = [size for size in SIZES if size < tables.rows]
        most = self._sizes[-1]
        where = device.torch_device
        # Rows, positions, and by how much a replay moves each position on (0 for padding).
        self._buffers = torch.zeros(3, most, dtype=torch.int64, device=where)
        self._captured: dict[tuple[int, bool], _Captured] = {}  # by size, and whether it shares prefixes
        self._memory: Any = None  # the memory pool that all graphs share
        self._rows: Ints | None = None  # of the last replay
        self._starts: Ints | None = None

    def fits(self, plan: Plan) -> bool:
        """Every span is a single token whose successor is sampled, and there are not too many."""
        return len(plan.rows) <= self._sizes[-1] and plan.decode and bool(plan.samples.all())

    def forget(self) -> None:
        """A step was computed without a graph: the positions in the buffers are behind."""
        self._rows = None

    def replay(self, plan: Plan) -> Replayed:
        """Compute a step whose plan fits and has been applied to the tables."""
        count = len(plan.rows)
        size = self._sizes[bisect.bisect_left(self._sizes, count)]
        sharing = bool(plan.shared) and self._tiling is not None
        captured = self._captured.get((size, sharing))
        if captured is None:
            captured = self.capture(size, sharing)
        moved_on = self._rows is plan.rows and self._starts is not None and self._starts[0] + 1 == plan.starts[0]
        if not moved_on:
            self._fill(size, plan.rows, plan.starts)
        if sharing and captured.groups is not plan.shared:
            self._share(captured, size, plan.shared)
        captured.graph.replay()
        self._rows, self._starts = plan.rows, plan.starts
        best = Sampled(captured.best.tokens[:count], captured.best.status[:count])
        return Replayed(captured.logits[:count], best)

    def capture(self, size: int, sharing: bool = False) -> _Captured:
        """Capture a batch size, for plans with shared prefixes or for those without. What is in the buffers is lost."""
        self._fill(size, np.empty(0, np.int32), np.empty(0, np.int32))
        numbers, shared = None, None
        if sharing and self._tiling is not None:
            numbers = self._device.upload(self._tiling.numbers((), size))
            shared = self._tiling.tiles(numbers, size)
        with torch.inference_mode():
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._step(size, shared)  # compiles kernels and sets up libraries, which a capture may not
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # Ranks add up their parts within the step, and NCCL's own thread may look at its events meanwhile.
            with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
                logits, best = self._step(size, shared)
        self._memory = self._memory or graph.pool()
        captured = self._captured[size, sharing] = _Captured(graph, logits, best, numbers)
        self.forget()
        return captured

    def _share(self, captured: _Captured, size: int, groups: tuple[SharedPrefix, ...]) -> None:
        assert captured.numbers is not None
        assert self._tiling is not None
        captured.numbers.copy_(self._device.upload(self._tiling.numbers(groups, size)))
        captured.groups = groups

    def _fill(self, size: int, rows: Ints, positions: Ints) -> None:
        values = np.zeros((3, size), np.int64)
        values[0] = self._spare_row
        count = len(rows)
        values[0, :count], values[1, :count], values[2, :count] = rows, positions, 1
        self._buffers[:, :size].copy_(self._device.upload(values))

    def _step(self, size: int, shared: SharedTiles | None) -> tuple[torch.Tensor, Sampled]:
        tables = self._tables
        rows, positions, advance = self._buffers[:, :size]
        places = rows * tables.columns + positions
        pages = tables.read_pages(rows * tables.pages_per_row + positions // tables.page_size)
        slots = pages if tables.page_size == 1 else pages * tables.page_size + positions % tables.page_size
        inputs = StepInputs(
            ids=tables.read_tokens(places),
            positions=positions,
            slots=slots,
            rows=rows,
            row_ids=(),
            starts=(),
            lengths=(1,) * size,
            page_table=tables.pages,
            page_size=tables.page_size,
            select=rows,
            decode=True,
            shared=shared,
        )
        step = Step(inputs, self._model.layers, self._pool, self._attention)
        logits = self._model.head(self._model.forward(inputs.ids, positions, step))
        best = self._sampler.best(logits)
        tables.write_tokens(places + 1, best.tokens)
        positions.add_(advance)
        return logits, best
