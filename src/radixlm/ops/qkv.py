"""This module owns what lies between a layer's q, k, v projection and its attention: head norms, rotation, KV write."""

from __future__ import annotations

import torch

from radixlm.ops import gpu
from radixlm.ops.norm import Norm
from radixlm.ops.rope import rotate_


def prepare(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: Norm | None,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Normalise and rotate queries and keys in place, and put keys and values where they are kept. One pass on a GPU.

    Args:
        qkv: [T, heads + 2 * kv_heads, dim], dense heads: queries, then keys, then values.
        cos, sin: [T, 1, dim], see `ops.rope.rotate_`.
        norm: of queries and keys, weight [heads + kv_heads, dim].
        slots: [T] int64.
        keys, values: [slots, kv_heads, dim] of equal strides, in any floating dtype.
    """
    if (kernels := gpu.kernels(qkv)) is not None:
        kernels.prepare_qkv(qkv, cos, sin, norm, slots, keys, values)
        return
    kv_heads = keys.shape[1]
    rotated = qkv.shape[1] - kv_heads
    qk = qkv.narrow(1, 0, rotated)
    if norm is not None:
        qk.copy_(norm(qk))
    rotate_(qk, cos, sin)
    keys.index_copy_(0, slots, qkv.narrow(1, rotated - kv_heads, kv_heads).to(keys.dtype))
    values.index_copy_(0, slots, qkv.narrow(1, rotated, kv_heads).to(values.dtype))
