"""This module owns what a step looks like to attention: `StepInputs`, the `AttentionBackend` protocol, and `Step`,
which layers call.

A layer never knows about pages or the tree: it hands `Step.attend` its q, k, v and gets the attended values back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from radixlm.memory.pool import KVPool


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one attention layer keeps and how it looks at it.

    Attributes:
        kv_heads, head_dim: shape of one token's key (and value).
        heads: query heads, a multiple of `kv_heads`.
        scale: multiplier of q.k.
        window: positions a query sees, itself included (0: all).
        soft_cap: logits are capped by `soft_cap * tanh(x / soft_cap)` (0: not).
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    soft_cap: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """One step as the device sees it. T = tokens of all spans laid end to end, B = spans, S = sampled positions.

    Attributes:
        ids, positions: [T] int64.
        slots: [T] int64; where each token's key and value go: page id * page_size + offset.
        rows: [B] int64, row of each span.
        starts, lengths: per span, on the host.
        page_table: [rows, pages per row] int32, the whole device table; the row's first
            `ceil((start + length) / page_size)` entries are valid.
        select: [S] int64, indices into T whose hidden state goes through the head.
        decode: every length is 1.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    rows: torch.Tensor
    starts: Sequence[int]
    lengths: Sequence[int]
    page_table: torch.Tensor
    page_size: int
    select: torch.Tensor
    decode: bool


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do. Sets of exact values, never ranges. An empty set means any."""

    devices: frozenset[str]
    dtypes: frozenset[torch.dtype] = frozenset()
    head_dims: frozenset[int] = frozenset()
    page_sizes: frozenset[int] = frozenset()
    window: bool = True
    soft_cap: bool = True
    requires: tuple[str, ...] = ()  # importable modules


class AttentionBackend(Protocol):
    """One implementation, held by the runner, stateless between steps."""

    capabilities: Capabilities

    def plan(self, inputs: StepInputs, pool: KVPool) -> Any:
        """Everything of a step that is the same for all layers (gather indices, masks). Called once a step."""
        ...

    def run(
        self, plan: Any, layer: int, spec: LayerSpec, pool: KVPool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Write k, v [T, kv_heads, head_dim] into the pool at `slots`, then attend causally.

        Args:
            q: [T, heads, head_dim].

        Returns:
            [T, heads * head_dim], in q's dtype.
        """
        ...


class Step:
    """A step in progress, handed through the model to its attention layers."""

    __slots__ = ("inputs", "specs", "pool", "backend", "_plan")

    def __init__(self, inputs: StepInputs, specs: Sequence[LayerSpec], pool: KVPool, backend: AttentionBackend) -> None:
        self.inputs = inputs
        self.specs = specs
        self.pool = pool
        self.backend = backend
        self._plan = backend.plan(inputs, pool)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.backend.run(self._plan, layer, self.specs[layer], self.pool, q, k, v)
