"""This module owns the reference attention: plain, slow, in float32. Every other backend is tested against it."""

from __future__ import annotations

import torch

from radixlm.attention.base import Capabilities, LayerSpec, StepInputs
from radixlm.memory.pool import KVPool

CAPABILITIES = Capabilities(
    devices=frozenset(),
    kv_dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2}),
)


class TorchReference:
    """One span and one query head after the other, the whole score matrix at once. Any device, dtype and page size."""

    capabilities = CAPABILITIES

    def plan(self, inputs: StepInputs, pool: KVPool) -> StepInputs:
        return inputs

    def run(
        self,
        plan: StepInputs,
        layer: int,
        spec: LayerSpec,
        pool: KVPool,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        pool.write(layer, plan.slots, k, v)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        first = 0
        for row, start, length in zip(plan.rows.tolist(), plan.starts, plan.lengths, strict=True):
            slots = row_slots(plan.page_table[row], start + length, plan.page_size)
            keys, values = pool.keys[layer][slots].float(), pool.values[layer][slots].float()
            last = first + length
            out[first:last] = attend(spec, q[first:last].float(), keys, values, start).to(q.dtype)
            first = last
        return out.flatten(1)


def row_slots(pages: torch.Tensor, length: int, page_size: int) -> torch.Tensor:
    """Slots [length] of positions 0 .. length - 1 of a row whose page table is `pages`."""
    positions = torch.arange(length, device=pages.device)
    return pages[positions // page_size].long() * page_size + positions % page_size


def attend(spec: LayerSpec, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int) -> torch.Tensor:
    """q [n, heads, head_dim] at positions start .. over keys, values [start + n, kv_heads, head_dim] -> like q."""
    query = torch.arange(start, start + len(q), device=q.device)[:, None]
    key = torch.arange(len(keys), device=q.device)
    hidden = key > query
    if spec.window:
        hidden |= key <= query - spec.window
    out = torch.empty_like(q)
    for head in range(spec.heads):
        kv_head = head // (spec.heads // spec.kv_heads)
        scores = q[:, head] @ keys[:, kv_head].T * spec.scale
        if spec.soft_cap:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
        out[:, head] = weights @ values[:, kv_head]
    return out
