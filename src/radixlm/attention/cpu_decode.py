"""This module owns decode attention on a CPU: one query token per row, as a few matrix products for many rows.

The query heads that share a key head are the rows of one product, so keys and values are never repeated. Rows that
share a prefix read it once: their queries are stacked into one product over it. The scores over the shared and over a
row's own positions lie side by side, so one softmax covers both and nothing has to be merged.
"""

from __future__ import annotations

import torch

from radixlm.attention.base import LayerSpec
from radixlm.attention.cpu_plan import Group, Place, consecutive
from radixlm.attention.scratch import Scratch

#: Up to this many keys of a single row one fused call beats three products (measured: 45 against 70 us at 300 keys).
FUSED_KEYS = 512


class DecodeBlock:
    """A group with the buffers it computes in, made once a step and run once a layer.

    n rows, K key heads, G query heads to each, D the head size, W keys at most. Buffers come from `scratch`, which all
    blocks share: a block leaves nothing in them.
    """

    __slots__ = ("_fused", "_gathered", "_index", "_mask", "_own_len", "_queries", "_result", "_scores", "_shared",
                 "_spec", "_wide", "first", "last")  # fmt: skip

    def __init__(
        self,
        group: Group,
        first: int,
        spec: LayerSpec,
        dtype: torch.dtype,
        cache_dtype: torch.dtype,
        scratch: Scratch,
    ) -> None:
        """
        Args:
            first: the group's first row among the rows of all blocks.
            dtype: of queries; keys and values are brought to it.
        """
        n, kv_heads, per_head = len(group.rows), spec.kv_heads, spec.heads // spec.kv_heads
        own_len = group.own.shape[1]
        width = group.shared_len + own_len
        self.first, self.last = first, first + n
        self._spec = spec
        self._shared = group.shared
        self._own_len = own_len
        self._index = torch.from_numpy(group.own.reshape(-1))
        run = consecutive(self._index)
        fits = n == 1 and group.shared is None and width <= FUSED_KEYS and not spec.soft_cap
        self._fused = run if fits and isinstance(run, slice) else None
        self._queries = scratch.take("queries", dtype, kv_heads, n, per_head, spec.head_dim)
        self._scores = scratch.take("scores", dtype, kv_heads, n, per_head, width)
        self._result = scratch.take("result", dtype, kv_heads, n, per_head, spec.head_dim)
        self._gathered = scratch.take("gathered", cache_dtype, 2 * kv_heads, n * own_len, spec.head_dim)
        self._wide = self._gathered
        if cache_dtype != dtype:
            self._wide = scratch.take("wide", dtype, 2 * kv_heads, n * own_len, spec.head_dim)
        self._mask = None
        if (group.own_lens != own_len).any():
            lens = torch.from_numpy(group.own_lens)[:, None, None]
            self._mask = torch.zeros(n, 1, own_len, dtype=dtype)
            self._mask.masked_fill_(torch.arange(own_len) >= lens, -torch.inf)

    def run(self, q: torch.Tensor, heads: torch.Tensor, out: torch.Tensor) -> None:
        """q [rows, heads, head_dim] and out [rows, heads * head_dim] of all blocks; heads: the pool's buffer."""
        spec = self._spec
        n, per_head = self.last - self.first, spec.heads // spec.kv_heads
        rows = q[self.first : self.last].view(n, spec.kv_heads, per_head, spec.head_dim)
        attended = out[self.first : self.last].view(n, spec.kv_heads, per_head, spec.head_dim)
        if self._fused is not None:
            attended.copy_(self._fuse(rows, heads[None, :, self._fused].to(q.dtype)))
            return
        torch.mul(rows.transpose(0, 1), spec.scale, out=self._queries)
        torch.index_select(heads, 1, self._index, out=self._gathered)
        if self._wide is not self._gathered:
            self._wide.copy_(self._gathered)
        shared = None if self._shared is None else read(heads, self._shared, q.dtype)
        self._score(shared)
        scores = self._scores
        if spec.soft_cap:
            scores.div_(spec.soft_cap).tanh_().mul_(spec.soft_cap)
        if self._mask is not None:
            scores[..., scores.shape[-1] - self._own_len :].add_(self._mask)
        torch.softmax(scores, -1, out=scores)
        self._sum(shared)
        attended.copy_(self._result.transpose(0, 1))

    def _fuse(self, rows: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
        """A single row through PyTorch's fused attention."""
        keys, values = both[:, : self._spec.kv_heads], both[:, self._spec.kv_heads :]
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        attended: torch.Tensor = fused(rows, keys, values, 0.0, False, scale=self._spec.scale)[0]
        return attended

    def _score(self, shared: torch.Tensor | None) -> None:
        """Fill the scores: products with the shared keys, then with each row's own."""
        kv_heads, n, per_head, width = self._scores.shape
        if shared is not None:
            scores = self._scores.view(kv_heads, n * per_head, width)[..., : width - self._own_len]
            keys = shared[:kv_heads].transpose(1, 2)
            torch.bmm(self._queries.view(kv_heads, n * per_head, -1), keys, out=scores)
        scores = self._scores.view(kv_heads * n, per_head, width)[..., width - self._own_len :]
        keys = self._wide[:kv_heads].view(kv_heads * n, self._own_len, -1).transpose(1, 2)
        torch.bmm(self._queries.view(kv_heads * n, per_head, -1), keys, out=scores)

    def _sum(self, shared: torch.Tensor | None) -> None:
        """Fill the result: the weighted values, shared ones first."""
        kv_heads, n, per_head, width = self._scores.shape
        weights = self._scores.view(kv_heads * n, per_head, width)[..., width - self._own_len :]
        values = self._wide[kv_heads:].view(kv_heads * n, self._own_len, -1)
        result = self._result.view(kv_heads * n, per_head, -1)
        if shared is None:
            torch.bmm(weights, values, out=result)
            return
        weights_shared = self._scores.view(kv_heads, n * per_head, width)[..., : width - self._own_len]
        torch.bmm(weights_shared, shared[kv_heads:], out=self._result.view(kv_heads, n * per_head, -1))
        torch.baddbmm(result, weights, values, out=result)


def read(heads: torch.Tensor, where: Place, dtype: torch.dtype) -> torch.Tensor:
    """heads [2 * K, slots, D] at `where` -> [2 * K, length, D] in `dtype`, dense.

    A run could be a view, but matrix products would copy it again, transposed and in every call.
    """
    if isinstance(where, slice):
        return heads[:, where].to(dtype).contiguous()
    return heads.index_select(1, where).to(dtype)
