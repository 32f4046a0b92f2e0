"""The Triton attention backend, interpreted, against the reference in float32, on a small grid."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from radixlm.attention.base import LayerSpec
from radixlm.attention.torch_ref import TorchReference
from support.attention import attended, make_step

BATCHES = {
    "decode": [(0, 1), (17, 1), (130, 1), (63, 1)],
    "one row": [(200, 1)],
    "mixed": [(70, 1), (0, 9), (37, 20)],
}
SPECS = {
    "gqa": LayerSpec(heads=8, kv_heads=2, head_dim=16, scale=0.25),
    "three": LayerSpec(heads=3, kv_heads=1, head_dim=24, scale=0.2),
    "window": LayerSpec(heads=2, kv_heads=1, head_dim=16, scale=0.25, window=40),
    "capped": LayerSpec(heads=2, kv_heads=2, head_dim=16, scale=0.25, soft_cap=5.0),
}


def test_a_captured_decode_step_has_no_dense_prompts() -> None:
    """It tells the host nothing of its rows; every one of them has a context all the same."""
    from radixlm.attention.cudnn import CudnnAttention

    spec = SPECS["gqa"]
    told, pages = make_step([(17, 1), (130, 1), (0, 1)], 1, torch.device("cpu"))
    captured = replace(told, row_ids=(), starts=(), lengths=(1,) * 3)
    backend = CudnnAttention()
    got = attended(backend, captured, pages, spec, torch.float32)
    expected = attended(TorchReference(), told, pages, spec, torch.float32)
    assert (got - expected).norm() / expected.norm() < 1e-5


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("spec", SPECS)
def test_equal_to_the_reference(spec: str, batch: str, page_size: int) -> None:
    from radixlm.attention.triton import TritonAttention

    inputs, pages = make_step(BATCHES[batch], page_size, torch.device("cpu"))
    got = attended(TritonAttention(), inputs, pages, SPECS[spec], torch.float32)
    expected = attended(TorchReference(), inputs, pages, SPECS[spec], torch.float32)
    assert torch.isfinite(got).all()
    assert (got - expected).norm() / expected.norm() < 1e-5
