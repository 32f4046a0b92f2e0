"""This module owns the fast attention backend for CPUs: it splits a step into decode rows and extends and runs each."""

from __future__ import annotations

import torch

from radixlm.attention import cpu_extend, cpu_plan
from radixlm.attention.base import Capabilities, LayerSpec, StepInputs
from radixlm.attention.cpu_decode import DecodeBlock, read
from radixlm.attention.cpu_plan import Place, Span
from radixlm.attention.scratch import Scratch
from radixlm.memory.pool import KVPool

CAPABILITIES = Capabilities(
    devices=frozenset({"cpu"}),
    dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
    kv_dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
)


class CpuPlan:
    """One step. What depends on a layer's shape and window is worked out at the first layer of its kind."""

    __slots__ = ("_blocks", "_places", "decodes", "extends", "order", "page_size", "slots")

    def __init__(self, inputs: StepInputs) -> None:
        self.page_size = inputs.page_size
        self.slots = cpu_plan.consecutive(inputs.slots)
        self.extends, self.decodes = cpu_plan.split(inputs)
        self._blocks: dict[tuple[LayerSpec, torch.dtype], tuple[torch.Tensor | None, list[DecodeBlock]]] = {}
        self._places: dict[int, list[Place]] = {}

    def blocks(
        self, spec: LayerSpec, dtype: torch.dtype, pool: KVPool, scratch: Scratch
    ) -> tuple[torch.Tensor | None, list[DecodeBlock]]:
        """(indices into the step's tokens of the decode rows in block order, or None for all in order; the blocks)."""
        made = self._blocks.get((spec, dtype))
        if made is not None:
            return made
        token_bytes = 2 * spec.kv_heads * spec.head_dim * pool.dtype.itemsize
        groups = cpu_plan.groups(self.decodes, self.page_size, spec.window, token_bytes, spec.heads * dtype.itemsize)
        order = [self.decodes[row].first for group in groups for row in group.rows]
        blocks: list[DecodeBlock] = []
        for group in groups:
            first = blocks[-1].last if blocks else 0
            blocks.append(DecodeBlock(group, first, spec, dtype, pool.dtype, scratch))
        whole = not self.extends and order == list(range(len(order)))
        made = (None if whole else torch.tensor(order), blocks)
        self._blocks[spec, dtype] = made
        return made

    def places(self, window: int) -> list[Place]:
        """For each extend span, where the positions lie that any of its tokens sees."""
        made = self._places.get(window)
        if made is None:
            made = [cpu_plan.place(span.pages, self.page_size, _begin(span, window), span.end) for span in self.extends]
            self._places[window] = made
        return made


class CpuAttention:
    """Attention in PyTorch operations that are fast on a CPU. Holds scratch memory, nothing that outlives a step."""

    capabilities = CAPABILITIES

    def __init__(self, fused: bool | None = None) -> None:
        """
        Args:
            fused: bf16 extends go through PyTorch's fused attention; None: where it is the faster way (AMX).
        """
        self._fused = _has_amx() if fused is None else fused
        self._scratch = Scratch()

    def plan(self, inputs: StepInputs, pool: KVPool) -> CpuPlan:
        return CpuPlan(inputs)

    def run(
        self,
        plan: CpuPlan,
        layer: int,
        spec: LayerSpec,
        pool: KVPool,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        pool.write(layer, plan.slots, k, v)
        out = q.new_empty(len(q), spec.heads * spec.head_dim)
        if plan.extends:
            self._extend(plan, spec, pool.heads[layer], q, out)
        if plan.decodes:
            order, blocks = plan.blocks(spec, q.dtype, pool, self._scratch)
            rows = q if order is None else q.index_select(0, order)
            attended = out if order is None else out.new_empty(len(order), out.shape[1])
            for block in blocks:
                block.run(rows, pool.heads[layer], attended)
            if order is not None:
                out.index_copy_(0, order, attended)
        return out

    def _extend(self, plan: CpuPlan, spec: LayerSpec, heads: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> None:
        fused = self._fused and q.dtype == torch.bfloat16 and not spec.soft_cap
        for span, where in zip(plan.extends, plan.places(spec.window), strict=True):
            both = read(heads, where, q.dtype)
            whole = not spec.window or span.end <= spec.window
            attend = cpu_extend.fused if fused and whole else cpu_extend.tiles
            attend(
                spec,
                q[span.first : span.last],
                both[: spec.kv_heads],
                both[spec.kv_heads :],
                out[span.first : span.last],
                self._scratch,
            )


def _begin(span: Span, window: int) -> int:
    """First position that the span's first token sees."""
    return max(0, span.start - window + 1) if window else 0


def _has_amx() -> bool:
    probe = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return bool(probe()) if probe is not None else False
