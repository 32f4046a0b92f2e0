"""This module owns the backend that sends whole prompts through cuDNN's attention and everything else through Triton's
kernels.

A prompt without a cached prefix needs no page table: its keys and values are the ones just computed, dense in memory.
That is what cuDNN's kernels want, and on recent GPUs they are nearly twice as fast as a paged kernel. Chunks behind a
prefix, short prompts and decode rows take the paged path.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from radixlm.attention.base import Capabilities, LayerSpec, StepInputs
from radixlm.attention.triton import TritonAttention
from radixlm.memory.pool import KVPool

CAPABILITIES = Capabilities(
    devices=frozenset({"cuda"}),
    dtypes=frozenset({torch.bfloat16, torch.float16}),
    head_dims=frozenset({64, 96, 128}),
    window=False,
    soft_cap=False,
    requires=("triton",),
    shared_prefix=True,
)

#: cuDNN makes a plan for every length that it meets, which takes far longer than to use it: prompts are filled up to a
#: multiple of this.
LENGTHS = 128

#: Shorter prompts do not fill the GPU one by one; the paged kernel takes many in one launch.
DENSE = 512


@dataclass(frozen=True, slots=True, eq=False)
class CudnnPlan:
    """One step: its first `paged` tokens take the paged path, then come the dense prompts.

    Attributes:
        dense: (how many, length) of prompts of one length that follow each other.
    """

    inputs: StepInputs
    paged: int
    rest: Any
    dense: tuple[tuple[int, int], ...]


class CudnnAttention:
    capabilities = CAPABILITIES

    def __init__(self) -> None:
        self._paged = TritonAttention()

    def plan(self, inputs: StepInputs, pool: KVPool) -> CudnnPlan:
        """New sequences come last in a step: the dense prompts are those at its end. A decode step has none, and if it
        is to be captured it says nothing of starts.
        """
        if inputs.decode:
            return CudnnPlan(inputs, len(inputs.slots), self._paged.plan(inputs, pool), ())
        spans = len(inputs.starts)
        while spans and inputs.starts[spans - 1] == 0 and inputs.lengths[spans - 1] >= DENSE:
            spans -= 1
        lengths = inputs.lengths[spans:]
        rest = inputs
        if lengths:
            rest = replace(
                inputs,
                rows=inputs.rows[:spans],
                row_ids=inputs.row_ids[:spans],
                starts=inputs.starts[:spans],
                lengths=inputs.lengths[:spans],
            )
        dense = tuple((len(list(same)), length) for length, same in itertools.groupby(lengths))
        return CudnnPlan(inputs, len(inputs.slots) - sum(lengths), self._paged.plan(rest, pool), dense)

    def run(
        self,
        plan: CudnnPlan,
        layer: int,
        spec: LayerSpec,
        pool: KVPool,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        self._paged.store(layer, pool, plan.inputs.slots, k, v)
        return self.run_stored(plan, layer, spec, pool, q, k, v)

    def run_stored(
        self,
        plan: CudnnPlan,
        layer: int,
        spec: LayerSpec,
        pool: KVPool,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        if not plan.dense:
            return self._paged.run_stored(plan.rest, layer, spec, pool, q, k, v)
        out = q.new_empty(len(q), spec.heads * spec.head_dim)
        if plan.paged:
            self._paged.attend(plan.rest, layer, spec, pool, q[: plan.paged], out[: plan.paged])
        at = plan.paged
        for count, length in plan.dense:
            part = slice(at, at + count * length)
            many = (count, length, -1, spec.head_dim)
            whole = _attend(q[part].view(many), k[part].view(many), v[part].view(many), spec)
            out[part].view(many).copy_(whole)
            at = part.stop
        return out


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: LayerSpec) -> torch.Tensor:
    """Causal attention of n prompts of T tokens: q [n, T, heads, head_dim], k, v [n, T, kv_heads, head_dim] -> as q."""
    length = q.shape[1]
    if more := -length % LENGTHS:  # behind the last token, where none of the others looks
        q, k, v = (F.pad(x, (0, 0, 0, 0, 0, more)) for x in (q, k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        whole = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=spec.scale, enable_gqa=spec.heads != spec.kv_heads
        )
    return whole.transpose(1, 2)[:, :length]
