"""Products with one order of sums, interpreted, and attention that goes through one kernel."""

from __future__ import annotations

import pytest
import torch

from radixlm.attention.base import LayerSpec
from radixlm.attention.torch_ref import TorchReference
from support.attention import attended, make_step


@pytest.mark.parametrize(("tokens", "outputs", "inputs"), [(1, 40, 72), (70, 33, 64), (130, 129, 200)])
def test_a_product(tokens: int, outputs: int, inputs: int) -> None:
    from radixlm.ops.triton_fixed import FEW, MANY, WIDE, product

    x, weight, bias = torch.randn(tokens, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    expected = x @ weight.T + bias
    for shape in (FEW, MANY, WIDE):
        assert torch.allclose(product(x, weight, bias, shape), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("spans", [[(90, 1), (0, 1), (31, 1)], [(70, 1), (0, 9), (37, 20)]])
def test_attention(spans: list[tuple[int, int]]) -> None:
    from radixlm.attention.fixed import FixedAttention

    spec = LayerSpec(heads=8, kv_heads=2, head_dim=16, scale=0.25)
    inputs, pages = make_step(spans, 16, torch.device("cpu"))
    got = attended(FixedAttention(), inputs, pages, spec, torch.float32)
    expected = attended(TorchReference(), inputs, pages, spec, torch.float32)
    assert (got - expected).norm() / expected.norm() < 1e-5
