"""This module owns the attention backend whose results for a token depend on its own sequence alone: neither on who is
computed beside it, nor on whether its prefix was computed in this step or long ago.

Every token, decoded or part of a prompt, goes through the extend kernel: one pass over its context from the first key
to the last, in blocks of one size. Contexts are not split and prefixes are not read together, so few rows with long
contexts are slow.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from radixlm.attention.base import LayerSpec, StepInputs
from radixlm.attention.triton import CAPABILITIES as TRITON
from radixlm.attention.triton import TritonAttention, TritonPlan
from radixlm.memory.pool import KVPool

CAPABILITIES = replace(TRITON, shared_prefix=False, deterministic=True)


class FixedAttention:
    capabilities = CAPABILITIES

    def __init__(self) -> None:
        self._kernels = TritonAttention()

    def plan(self, inputs: StepInputs, pool: KVPool) -> TritonPlan:
        """A step of which nothing is decoded: a decode row is an extend of one token."""
        return TritonPlan(inputs, None, {})

    def run(
        self,
        plan: TritonPlan,
        layer: int,
        spec: LayerSpec,
        pool: KVPool,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        return self._kernels.run(plan, layer, spec, pool, q, k, v)

    def run_stored(
        self,
        plan: TritonPlan,
        layer: int,
        spec: LayerSpec,
        pool: KVPool,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        return self._kernels.run_stored(plan, layer, spec, pool, q, k, v)
