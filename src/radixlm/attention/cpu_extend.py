"""This module owns extend attention on a CPU: many query tokens of one row, causal, after whatever prefix it has.

Two ways, chosen by the processor:
`tiles`: a tile of queries against all keys it may see, as product, softmax, product. Twice as fast as PyTorch's fused
attention where bf16 products are fast but it has no kernel for them (AVX512-bf16 without AMX), as fast in float32, and
the only one that knows windows and soft caps. Keys after the tile's last query are not touched, so about half of the
square is saved, as causal attention should.
`fused`: PyTorch's fused CPU attention, twice as fast in bf16 on processors with AMX. It cannot be causal behind a
prefix: prefix and own part are attended separately and merged by their log-sum-exp.
"""

from __future__ import annotations

import torch

from radixlm.attention.base import LayerSpec
from radixlm.attention.scratch import Scratch

#: Queries per tile, by dtype (measured: 128 in bf16, 64 in float32), if the tile's scores fit in TILE_BYTES.
TILE_QUERIES = {torch.bfloat16: 128}
OTHER_TILE_QUERIES = 64
TILE_BYTES = 8 << 20


def tiles(
    spec: LayerSpec, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor, scratch: Scratch
) -> None:
    """Attend from q [n, heads, D], the last n of the positions that keys, values [kv_heads, length, D] cover.

    out [n, heads * D] is written.
    """
    count, kv_heads, dim = len(q), spec.kv_heads, spec.head_dim
    per_head = spec.heads // kv_heads
    length = keys.shape[1]
    before = length - count
    queries = q.view(count, kv_heads, per_head, dim).transpose(0, 1)
    attended = out.view(count, kv_heads, per_head, dim).transpose(0, 1)
    step = _tile(spec, length, q.dtype)
    for first in range(0, count, step):
        last = min(first + step, count)
        n, end = last - first, before + last
        begin = max(0, before + first - spec.window + 1) if spec.window else 0
        tile = scratch.take("queries", q.dtype, kv_heads, n, per_head, dim)
        scores = scratch.take("scores", q.dtype, kv_heads, n, per_head, end - begin)
        result = scratch.take("result", q.dtype, kv_heads, n, per_head, dim)
        flat = scores.view(kv_heads, n * per_head, end - begin)
        torch.mul(queries[:, first:last], spec.scale, out=tile)
        # Dense, because the product would make a transposed copy of a part.
        seen = keys[:, begin:end].contiguous().transpose(1, 2)
        torch.bmm(tile.view(kv_heads, n * per_head, dim), seen, out=flat)
        if spec.soft_cap:
            scores.div_(spec.soft_cap).tanh_().mul_(spec.soft_cap)
        _mask(scores, spec.window)
        torch.softmax(scores, -1, out=scores)
        torch.bmm(flat, values[:, begin:end], out=result.view(kv_heads, n * per_head, dim))
        attended[:, first:last] = result


def fused(
    spec: LayerSpec, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor, scratch: Scratch
) -> None:
    """The same through PyTorch's fused attention; no window, no soft cap."""
    count, kv_heads, dim = len(q), spec.kv_heads, spec.head_dim
    per_head, before = spec.heads // kv_heads, keys.shape[1] - count
    queries = q.view(count, kv_heads, per_head, dim).permute(1, 2, 0, 3)

    def attend(first: int, last: int, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (kv_heads, per_head, last - first, dim)
        k, v = (side[:, None, first:last].expand(shape) for side in (keys, values))
        call = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        attended, log_sum = call(queries, k, v, 0.0, causal, scale=spec.scale)
        return attended, log_sum

    attended, own_sum = attend(before, before + count, True)
    if before:
        earlier, earlier_sum = attend(0, before, False)
        share = torch.sigmoid(earlier_sum.float() - own_sum.float())[..., None]
        attended = torch.lerp(attended.float(), earlier.float(), share)
    out.view(count, kv_heads, per_head, dim).permute(1, 2, 0, 3).copy_(attended)


def _tile(spec: LayerSpec, length: int, dtype: torch.dtype) -> int:
    """Queries per tile."""
    fitting = TILE_BYTES // (spec.heads * length * dtype.itemsize)
    return max(1, min(TILE_QUERIES.get(dtype, OTHER_TILE_QUERIES), fitting))


def _mask(scores: torch.Tensor, window: int) -> None:
    """Hide from query i of scores [kv_heads, n, per_head, width], the last of which sees all keys, what it may not see.

    Query i stands at column width - n + i: later columns are its future. Before its window lie columns up to i of the
    first n - 1 (where the tile begins at the first query's window; it is longer than that window or starts at 0).
    """
    n, width = scores.shape[1], scores.shape[3]
    future = torch.full((n, n), -torch.inf, dtype=scores.dtype).triu_(1)
    scores[..., width - n :].add_(future[:, None])
    if window and width > window:
        # Column c is out of sight of query i where c <= (width - n + i) - window.
        past = torch.full((n, width - window), -torch.inf, dtype=scores.dtype).tril_(width - n - window)
        scores[..., : width - window].add_(past[:, None])
