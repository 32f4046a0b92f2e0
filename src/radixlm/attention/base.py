"""This module owns what a step looks like to attention: `StepInputs`, the `AttentionBackend` protocol, and `Step`,
which layers call.

A layer never knows about pages or the tree: it hands `Step.attend` its q, k, v and gets the attended values back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from radixlm.memory.pool import KVPool
from radixlm.ops.norm import Norm
from radixlm.ops.qkv import prepare


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
class SharedTiles:
    """Prefixes that decode rows share, cut into pieces of work (see `attention.tiles`).

    A tile is some rows that share a prefix; a piece is the queries of a tile against a part of its prefix. A piece
    gives each of its rows one partial result; partial results are numbered, those of one piece one after the other.
    W = pieces there is room for, R = rows of a tile, B = spans. All int32, on the device.

    Attributes:
        members: [W, R] spans of the piece's tile, -1 behind the last one.
        pieces: [W, 3] first position, position behind the last, number of the first member's partial result. A piece
            without positions is none.
        shares: [B, 4] per span: how many positions it shares (0: none), number of its first partial result, how many
            there are, and from one to the next.
        partials: partial results there is room for.
    """

    members: torch.Tensor
    pieces: torch.Tensor
    shares: torch.Tensor
    partials: int


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """One step as the device sees it. T = tokens of all spans laid end to end, B = spans, S = sampled positions.

    Attributes:
        ids, positions: [T] int64.
        slots: [T] int64; where each token's key and value go: page id * page_size + offset.
        rows: [B] int64, row of each span.
        row_ids, starts, lengths: per span, on the host.
        page_table: [rows, pages per row] int32, the whole device table; the row's first
            `ceil((start + length) / page_size)` entries are valid.
        select: [S] int64, indices into T whose hidden state goes through the head.
        decode: every length is 1.
        shared: prefixes that rows share, of the spans of one token that come first in a step (all of a decode step). A
            hint that a backend with `shared_prefix` takes.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    rows: torch.Tensor
    row_ids: Sequence[int]
    starts: Sequence[int]
    lengths: Sequence[int]
    page_table: torch.Tensor
    page_size: int
    select: torch.Tensor
    decode: bool
    shared: SharedTiles | None = None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do. Sets of exact values, never ranges. An empty set means any.

    Attributes:
        kv_dtypes: of keys and values in the pool, where not that of the activations.
        requires: importable modules.
        shared_prefix: decode rows make use of `StepInputs.shared`.
        deterministic: a token's result depends on its own sequence alone, to the last bit.
    """

    devices: frozenset[str]
    dtypes: frozenset[torch.dtype] = frozenset()
    kv_dtypes: frozenset[torch.dtype] = frozenset()
    head_dims: frozenset[int] = frozenset()
    page_sizes: frozenset[int] = frozenset()
    window: bool = True
    soft_cap: bool = True
    requires: tuple[str, ...] = ()
    shared_prefix: bool = False
    deterministic: bool = False


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


class StoredBackend(AttentionBackend, Protocol):
    """One that can leave the writing to a kernel before it, which has keys and values at hand anyway."""

    def run_stored(
        self, plan: Any, layer: int, spec: LayerSpec, pool: KVPool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """The same as `run`, with k, v already in the pool."""
        ...


class Step:
    """A step in progress, handed through the model to its attention layers.

    Attributes:
        fuses: the backend takes q, k, v as the projection gives them (`attend_fused`).
    """

    __slots__ = ("_plan", "backend", "fuses", "inputs", "pool", "specs")

    def __init__(self, inputs: StepInputs, specs: Sequence[LayerSpec], pool: KVPool, backend: AttentionBackend) -> None:
        self.inputs = inputs
        self.specs = specs
        self.pool = pool
        self.backend = backend
        self.fuses = hasattr(backend, "run_stored")
        self._plan = backend.plan(inputs, pool)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.backend.run(self._plan, layer, self.specs[layer], self.pool, q, k, v)

    def attend_fused(
        self, layer: int, qkv: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], norm: Norm | None
    ) -> torch.Tensor:
        """Head norms, rotation and the KV write as one pass over the projection's output, then attention.

        Args:
            qkv: [T, heads + 2 * kv_heads, head_dim], dense: queries, keys, values. Overwritten.
            rotation: cos and sin, [T, 1, head_dim] each.
            norm: of queries and keys, weight [heads + kv_heads, head_dim].

        Returns:
            [T, heads * head_dim].
        """
        spec, pool = self.specs[layer], self.pool
        prepare(qkv, *rotation, norm, self.inputs.slots, pool.keys[layer], pool.values[layer])
        q = qkv.narrow(1, 0, spec.heads)
        k, v = (qkv.narrow(1, spec.heads + i * spec.kv_heads, spec.kv_heads) for i in (0, 1))
        return cast(StoredBackend, self.backend).run_stored(self._plan, layer, spec, pool, q, k, v)
