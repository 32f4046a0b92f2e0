"""Inputs for ops with several results, and what these must be."""

from __future__ import annotations

from collections.abc import Callable

import torch

from radixlm.layers.norm import RmsNorm
from radixlm.memory.pool import KVPool
from radixlm.ops import rope
from radixlm.ops.norm import rms_norm_reference
from radixlm.ops.rope import RopeParameters, rotate_reference

#: Query heads, key heads, size of a head.
QKV_SHAPES = [(4, 2, 16), (3, 1, 24), (9, 3, 8)]


class Layer:
    """What a layer's projection gives for some tokens, and everything that is needed to prepare it for attention."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        tokens: int,
        dtype: torch.dtype,
        kept: torch.dtype,
        normed: bool,
        device: torch.device,
    ) -> None:
        """
        Args:
            kept: dtype of the pool.
        """
        self.heads, self.kv_heads, dim = shape
        generator = torch.Generator().manual_seed(5)

        def draw(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator).to(device)

        self.qkv = draw(tokens, self.heads + 2 * self.kv_heads, dim).to(dtype)
        self.norm = RmsNorm(draw(self.heads + self.kv_heads, dim), 1e-6) if normed else None
        self.slots = torch.randperm(4 * tokens, generator=generator)[:tokens].to(device)
        self.pool = KVPool([(self.kv_heads, dim)], 4 * tokens, 1, kept, device)
        self.pool.heads[0].copy_(draw(*self.pool.heads[0].shape))
        table = rope.table(RopeParameters(dim, 100.0), 50, dtype, device)
        positions = torch.randint(0, 50, (tokens,), generator=generator).to(device)
        found = table.index_select(0, positions)
        self.rotation = found[:, :1], found[:, 1:]

    def check(self, prepare: Callable[..., None], rounding: float) -> None:
        """Run `ops.qkv.prepare` or one like it, and compare with one reference after the other, in float32."""
        dim, rotated = self.qkv.shape[2], self.heads + self.kv_heads
        qk, v = self.qkv[:, :rotated].float(), self.qkv[:, rotated:].float()
        if self.norm is not None:
            qk = rms_norm_reference(qk, self.norm.weight, 1e-6)
        cos, sin = self.rotation
        plain_sin = torch.cat((-sin[:, 0, : dim // 2], sin[:, 0, dim // 2 :]), -1)
        qk = rotate_reference(qk, cos[:, 0], plain_sin)
        keys, values = self.pool.keys[0], self.pool.values[0]
        others = torch.ones(len(keys), dtype=torch.bool).index_fill_(0, self.slots.cpu(), False).to(keys.device)
        before = keys.float()[others], values.float()[others]

        prepare(self.qkv, cos, sin, self.norm, self.slots, keys, values)

        close(self.qkv[:, :rotated], qk, rounding)
        close(self.qkv[:, rotated:], v, rounding)
        keys, values = keys.float(), values.float()  # 8-bit numbers know few operations
        close(keys[self.slots], qk[:, self.heads :], rounding)
        close(values[self.slots], v, rounding)
        assert torch.equal(keys[others], before[0])
        assert torch.equal(values[others], before[1])


def close(got: torch.Tensor, expected: torch.Tensor, rounding: float) -> None:
    assert torch.isfinite(got).all()
    error = (got.float() - expected.float()).norm() / expected.float().norm()
    assert error < rounding, f"relative error {error:.2e}"


def scores_of_every_kind(
    size: int, dtype: torch.dtype, device: torch.device | None = None
) -> tuple[torch.Tensor, list[int], list[bool]]:
    """Rows of a score matrix [8, size] that is a view, their best columns, and whether they are sound."""
    scores = (torch.randn(8, size + 28, generator=torch.Generator().manual_seed(6)) * 4).to(dtype)
    scores[:, size:] = 1000  # padding of the vocabulary
    scores[1, [3, 70, size - 1]] = 50  # the first of equal ones
    scores[2, [size - 2, size - 1]] = 50
    scores[3, 17] = torch.nan
    scores[4, 18] = torch.inf
    scores[5, :size] = -torch.inf
    scores[6, : size - 1] = -torch.inf
    scores[7, [5, size // 2]] = torch.tensor([60.0, torch.nan]).to(dtype)
    sound = [True, True, True, False, False, False, True, False]
    best = [int(scores[0, :size].float().argmax()), 3, size - 2, 0, 0, 0, size - 1, 0]
    return scores.to(device)[:, :size], best, sound
