"""The Triton kernels of thin products, interpreted, against products in float64."""

from __future__ import annotations

import pytest
import torch

from radixlm.layers.norm import RmsNorm
from radixlm.ops.activation import GELU, SILU
from radixlm.ops.linear import GpuLinear, PlainLinear
from radixlm.ops.thin import MEASURED, Tiles, Vector, Way, choose
from support.products import CASES, Fused, Product, possible

CPU = torch.device("cpu")
WAYS = [
    Vector(tokens=1, rows=2, columns=64, unroll=1),
    Vector(tokens=1, rows=8, columns=32, unroll=2),
    Vector(tokens=4, rows=4, columns=64, unroll=2, stages=3),
    Tiles(tokens=16, rows=16, columns=32),
    Tiles(tokens=16, rows=16, columns=32, split=2),
    Tiles(tokens=32, rows=32, columns=16, split=4),
]


#: Everything on a weight that no tile fits; what fits leaves masks out, whatever is fused.
RUNS = [(way, case, (20, 72)) for way in WAYS for case in CASES if possible(way, CASES[case])]
RUNS += [(way, "bias and add", (32, 128)) for way in WAYS]


@pytest.mark.parametrize(("way", "case", "shape"), RUNS, ids=str)
def test_products(way: Way, case: str, shape: tuple[int, int]) -> None:
    Product(CASES[case], *shape, torch.float16, CPU).check(way, max(1, way.tokens - 1), 2e-3)


def test_a_split_product_repeats_and_leaves_its_counts_at_zero() -> None:
    product = Product(CASES["plain"], 32, 256, torch.float16, CPU)
    way = Tiles(tokens=16, rows=16, columns=32, split=4)
    x = product.input(5)
    assert torch.equal(product.multiply(way, x), product.multiply(way, x))
    assert not product.counts.any()


@pytest.mark.parametrize("tokens", [1, 9, 70])  # on ordinary units, on matrix units, by the library
@pytest.mark.parametrize("everything", [False, True])
def test_a_layer_gives_the_same_whichever_way_it_takes(everything: bool, tokens: int) -> None:
    torch.manual_seed(7)
    weight = torch.randn(16, 64).half() / 8
    offset = torch.randn(16).half() if everything else None
    norm = RmsNorm(torch.randn(64).half(), 1e-5) if everything else None
    x, residual = torch.randn(tokens, 64).half(), torch.randn(tokens, 16).half()
    layer = GpuLinear(weight, offset, norm)
    plain = PlainLinear(weight.float(), None if offset is None else offset.float())
    wide = x.float() if norm is None else norm(x.float())

    def close(got: torch.Tensor, expected: torch.Tensor) -> bool:
        return bool((got.float() - expected).norm() < 3e-3 * expected.norm())

    assert close(layer(x), plain(wide))
    assert close(layer.gated(x, SILU), plain.gated(wide, SILU))
    assert close(layer.gated(x, GELU), plain.gated(wide, GELU))
    assert close(layer.plus(x, residual.clone()), plain.plus(wide, residual.float()))


def test_a_norm_that_would_be_rounded_is_applied_before() -> None:
    norm = RmsNorm(1 + torch.randn(64) * 1e-4, 1e-5)  # most of it lost in 16 bits
    weight = torch.randn(16, 64).half()
    x = torch.randn(2, 64).half()
    assert torch.equal(GpuLinear(weight, None, norm)(x), GpuLinear(weight, None)(norm(x)))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", [(4096, 1024), (1024, 2048), (28672, 4096), (192, 64), (48, 576)], ids=str)
def test_the_rule_gives_ways_that_can_do_it(shape: tuple[int, int], gated: bool) -> None:
    for tokens in range(1, 70):
        way = choose(tokens, *shape, gated)
        if way is not None:
            assert tokens <= way.tokens
            assert possible(way, Fused(gated=gated))
    assert choose(0, *shape, gated) is None
    assert choose(1000, *shape, gated) is None
    assert choose(1, shape[0], 1001) is None  # rows that are not aligned


def test_measured_ways_have_room() -> None:
    for steps in MEASURED.values():
        assert [most for most, _ in steps] == sorted({most for most, _ in steps})
        assert all(way is None or most <= way.tokens for most, way in steps)
