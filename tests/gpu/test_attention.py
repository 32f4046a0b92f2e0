"""The Triton attention backend on a GPU against the reference in float32."""

from __future__ import annotations

import pytest
import torch

from radixlm.attention.base import LayerSpec
from radixlm.attention.tiles import Tiling
from radixlm.attention.torch_ref import TorchReference
from support.attention import attended, make_step, together

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BATCHES = {
    "decode": [(0, 1), (17, 1), (300, 1), (1500, 1), (63, 1)],
    "one row": [(700, 1)],
    "prompts": [(0, 1), (0, 33), (0, 129), (0, 300)],
    "extends": [(5, 40), (128, 64), (1000, 7), (63, 200)],
    "mixed": [(100, 1), (0, 90), (400, 1), (37, 130)],
}
SPECS = {
    "gqa": LayerSpec(heads=8, kv_heads=2, head_dim=128, scale=128**-0.5),
    "three": LayerSpec(heads=9, kv_heads=3, head_dim=64, scale=64**-0.5),
    "mqa": LayerSpec(heads=8, kv_heads=1, head_dim=256, scale=0.0625),
    "mha 80": LayerSpec(heads=4, kv_heads=4, head_dim=80, scale=80**-0.5),
    "mha 96": LayerSpec(heads=4, kv_heads=4, head_dim=96, scale=96**-0.5),
    "window": LayerSpec(heads=4, kv_heads=2, head_dim=64, scale=0.125, window=96),
    "capped": LayerSpec(heads=4, kv_heads=2, head_dim=64, scale=0.125, soft_cap=30.0),
}


#: Starts of decode rows, and who shares how much: (spans, positions).
SHARED = {
    "pair": ([700, 640], [([0, 1], 640)]),
    "one group": ([1152 + 9 * i for i in range(16)], [(range(16), 1152)]),
    "more than a tile": ([2048 + i for i in range(100)], [(range(100), 2048)]),
    "groups and strangers": (
        [5000, 300, 77, *range(4096, 4106), 900, 0, *range(640, 700)],
        [([0, *range(3, 13)], 4096), ([1, 13], 256), (range(16, 75), 576)],
    ),
    "none": ([100, 1000], []),
}


@pytest.mark.parametrize("spec", ["gqa", "three", "mha 96"])
@pytest.mark.parametrize("spans", [[(0, 700)], [(40, 1), (0, 30), (0, 512), (0, 1500)], [(9, 600), (0, 513)], [(7, 1)]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_prompts_through_cudnn(dtype: torch.dtype, spans: list[tuple[int, int]], spec: str) -> None:
    from radixlm.attention.cudnn import CudnnAttention

    inputs, pages = make_step(spans, 16, torch.device("cuda"))
    got = attended(CudnnAttention(), inputs, pages, SPECS[spec], dtype).float()
    expected = attended(TorchReference(), inputs, pages, SPECS[spec], dtype).float()
    assert (got - expected).norm() / expected.norm() < 1e-2


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_equal_to_the_reference(dtype: torch.dtype, spec: str, batch: str, page_size: int) -> None:
    from radixlm.attention.triton import TritonAttention

    device = torch.device("cuda")
    inputs, pages = make_step(BATCHES[batch], page_size, device)
    got = attended(TritonAttention(), inputs, pages, SPECS[spec], dtype).float()
    expected = attended(TorchReference(), inputs, pages, SPECS[spec], dtype).float()
    assert torch.isfinite(got).all()
    error = (got - expected).norm() / expected.norm()
    assert error < {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_keys_and_values_of_8_bits(kv_dtype: torch.dtype, spec: str, batch: str, page_size: int) -> None:
    """The reference reads the same rounded numbers: what differs is the arithmetic alone."""
    from radixlm.attention.triton import TritonAttention

    inputs, pages = make_step(BATCHES[batch], page_size, torch.device("cuda"))
    got = attended(TritonAttention(), inputs, pages, SPECS[spec], torch.bfloat16, kv_dtype=kv_dtype).float()
    expected = attended(TorchReference(), inputs, pages, SPECS[spec], torch.bfloat16, kv_dtype=kv_dtype).float()
    assert torch.isfinite(got).all()
    assert (got - expected).norm() / expected.norm() < 1e-2


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("case", SHARED)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_shared_prefixes_equal_the_reference(dtype: torch.dtype, spec: str, case: str, page_size: int) -> None:
    from radixlm.attention.triton import TritonAttention

    starts, groups = SHARED[case]
    shared = together(*groups)
    tiling = Tiling.of([SPECS[spec]], 132) or Tiling(16, 33)
    inputs, pages = make_step(
        [(start, 1) for start in starts], page_size, torch.device("cuda"), groups=shared, tiling=tiling
    )
    got = attended(TritonAttention(), inputs, pages, SPECS[spec], dtype).float()
    expected = attended(TorchReference(), inputs, pages, SPECS[spec], dtype).float()
    assert torch.isfinite(got).all()
    error = (got - expected).norm() / expected.norm()
    assert error < {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
