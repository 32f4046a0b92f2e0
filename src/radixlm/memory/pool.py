"""This module owns the KV pool: keys and values of every layer, addressed by slot (page id * page size + offset)."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class KVPool:
    """Per layer one buffer of [2, kv_heads, slots, head_dim]: keys, then values.

    Head before slot: a run of consecutive slots is then one dense [run, head_dim] matrix per head, which is what a
    matrix product wants; gathered rows come out in the same form. Who may use which slot is decided by
    `cache.manager`; this class only holds bytes.

    Attributes:
        heads: per layer, [2 * kv_heads, slots, head_dim]: all key heads, then all value heads.
        keys, values: per layer, views of the same bytes as [slots, kv_heads, head_dim].
    """

    def __init__(
        self, shapes: Sequence[tuple[int, int]], pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """
        Args:
            shapes: (kv_heads, head_dim) of each layer.
        """
        self.pages = pages
        self.page_size = page_size
        self.dtype = dtype
        slots = pages * page_size
        # empty, not zeros: untouched pages of a large pool then cost no memory on a CPU.
        self.heads = [torch.empty(2 * heads, slots, dim, dtype=dtype, device=device) for heads, dim in shapes]
        self.keys = [buffer[: len(buffer) // 2].transpose(0, 1) for buffer in self.heads]
        self.values = [buffer[len(buffer) // 2 :].transpose(0, 1) for buffer in self.heads]

    def write(self, layer: int, slots: torch.Tensor | slice, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k, v [T, kv_heads, head_dim] at slots [T]. A slice says that the slots are consecutive (faster)."""
        keys, values = self.keys[layer], self.values[layer]
        if isinstance(slots, slice):
            keys[slots] = k
            values[slots] = v
        elif self.dtype.itemsize == 1:  # torch copies numbers of 8 bits by indexing alone
            keys[slots] = k.to(self.dtype)
            values[slots] = v.to(self.dtype)
        else:
            keys.index_copy_(0, slots, k.to(self.dtype))
            values.index_copy_(0, slots, v.to(self.dtype))

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.heads)
