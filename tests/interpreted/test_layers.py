"""An attention layer over the Triton backend, which prepares and writes in one pass, against separate steps."""

from __future__ import annotations

import pytest
import torch

from radixlm.attention.base import AttentionBackend, LayerSpec, Step
from radixlm.attention.torch_ref import TorchReference
from radixlm.layers.attention import Attention
from radixlm.layers.norm import RmsNorm
from radixlm.layers.rope import Rope
from radixlm.memory.pool import KVPool
from radixlm.ops import gpu
from radixlm.ops.linear import PlainLinear
from radixlm.ops.rope import RopeParameters
from support.attention import make_step

SPEC = LayerSpec(heads=6, kv_heads=2, head_dim=16, scale=0.25)
CPU = torch.device("cpu")


@pytest.mark.parametrize("spans", [[(40, 1), (0, 1), (17, 1)], [(20, 5), (0, 11)]], ids=["decode", "extend"])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("reference_ops", [False, True])
def test_a_fused_step_equals_separate_ones(
    monkeypatch: pytest.MonkeyPatch, reference_ops: bool, normed: bool, spans: list[tuple[int, int]]
) -> None:
    from radixlm.attention.triton import TritonAttention
    from radixlm.ops import triton_kernels

    inputs, pages = make_step(spans, 1, CPU)
    torch.manual_seed(8)
    heads = SPEC.heads + 2 * SPEC.kv_heads
    norm = RmsNorm(torch.randn(SPEC.heads + SPEC.kv_heads, 16), 1e-6) if normed else None
    layer = Attention(
        0, SPEC, PlainLinear(torch.randn(heads * 16, 32), None), PlainLinear(torch.randn(32, 96), None), norm
    )
    x, kept = torch.randn(len(inputs.slots), 32), torch.randn(2 * SPEC.kv_heads, pages, 16)
    rotation = Rope(RopeParameters(16, 100.0), 64, torch.float32, CPU)(inputs.positions)

    def run(backend: AttentionBackend) -> tuple[torch.Tensor, torch.Tensor]:
        pool = KVPool([(SPEC.kv_heads, 16)], pages, 1, torch.float32, CPU)
        pool.heads[0].copy_(kept)
        step = Step(inputs, (SPEC,), pool, backend)
        assert step.fuses == isinstance(backend, TritonAttention)
        return layer(x, rotation, step), pool.heads[0]

    expected = run(TorchReference())
    if not reference_ops:
        monkeypatch.setattr(gpu, "kernels", lambda x: triton_kernels)
    for got, wanted in zip(run(TritonAttention()), expected, strict=True):
        assert (got - wanted).norm() < 1e-5 * wanted.norm()
