"""The Triton kernels of ops on a GPU, compiled, against references in float32 or float64."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch.nn import functional as F

from radixlm.layers.norm import RmsNorm
from radixlm.ops import gpu, linear
from radixlm.ops.activation import GELU, SILU, gated
from radixlm.ops.linear import GpuLinear, PlainLinear
from radixlm.ops.norm import rms_norm_reference
from radixlm.ops.thin import Tiles, Vector, Way, choose
from radixlm.sampling.sampler import LARGEST_SCORE, NOT_FINITE
from support.ops import Layer, close, scores_of_every_kind
from support.products import CASES, Product, possible

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
#: Relative errors of one rounding.
ROUNDING = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3, torch.float8_e4m3fn: 5e-2}
WAYS = [
    Vector(tokens=1, rows=8, columns=1024, unroll=4),
    Vector(tokens=1, rows=2, columns=512, warps=2, unroll=1),
    Vector(tokens=2, rows=8, columns=1024, unroll=2),
    Vector(tokens=4, rows=4, columns=1024, unroll=1, stages=3),
    Vector(tokens=8, rows=4, columns=1024, unroll=1),
    Tiles(tokens=16, rows=16, columns=256, warps=2),
    Tiles(tokens=16, rows=16, columns=256, split=4, warps=2),
    Tiles(tokens=16, rows=64, columns=128, split=2),
    Tiles(tokens=64, rows=64, columns=128),
    Tiles(tokens=64, rows=128, columns=64, split=8, warps=8),
]


@pytest.fixture
def kernels() -> ModuleType:
    from radixlm.ops import triton_kernels

    return triton_kernels


@pytest.fixture(params=[False, True], ids=["in turn", "early"])
def starts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels one after the other, and each beginning while the one before it ends."""
    monkeypatch.setattr(gpu, "EARLY", request.param)
    yield
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm(kernels: ModuleType, dtype: torch.dtype) -> None:
    eps = torch.tensor([1e-5], device=CUDA)
    for x, weight in (
        (torch.randn(300, 4096), torch.randn(4096)),
        (torch.randn(7, 1000), torch.randn(1000)),
        (torch.randn(65, 32, 128)[:, :24], torch.randn(24, 128)),
    ):
        x, weight = x.to(CUDA, dtype), weight.cuda()
        close(kernels.rms_norm(x, weight, eps), rms_norm_reference(x, weight, 1e-5), ROUNDING[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_and_multiply(kernels: ModuleType, dtype: torch.dtype) -> None:
    x = torch.randn(70, 2 * 3000).to(CUDA, dtype)
    gate, up = x.float().chunk(2, -1)
    close(kernels.silu_mul(x), F.silu(gate) * up, 2 * ROUNDING[dtype])


@pytest.mark.usefixtures("starts")
@pytest.mark.parametrize("tokens", [1, 5, 300])
@pytest.mark.parametrize("shape", [(32, 8, 128), (9, 3, 64), (4, 1, 256), (8, 8, 80), (4, 2, 96)], ids=str)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_rotation_and_write_in_one(
    kernels: ModuleType, dtype: torch.dtype, normed: bool, shape: tuple[int, int, int], tokens: int
) -> None:
    layer = Layer(shape, tokens, dtype, dtype, normed, CUDA)
    layer.check(kernels.prepare_qkv, ROUNDING[dtype])


@pytest.mark.parametrize("kept", [torch.float16, torch.float8_e4m3fn], ids=str)
def test_a_pool_of_another_dtype_is_written_in_one(kernels: ModuleType, kept: torch.dtype) -> None:
    layer = Layer((16, 8, 128), 20, torch.bfloat16, kept, True, CUDA)
    layer.check(kernels.prepare_qkv, max(ROUNDING[torch.bfloat16], ROUNDING[kept]))


@pytest.mark.usefixtures("starts")
@pytest.mark.parametrize("size", [100, 2048, 151936])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_best_of_each_row(kernels: ModuleType, dtype: torch.dtype, size: int) -> None:
    scores, tokens, sound = scores_of_every_kind(size, dtype, CUDA)
    got, status = kernels.best(scores, LARGEST_SCORE, NOT_FINITE)
    assert got.tolist() == tokens
    assert status.tolist() == [0 if good else NOT_FINITE for good in sound]


@pytest.mark.usefixtures("starts")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_products(way: Way, case: str) -> None:
    if not possible(way, CASES[case]):
        pytest.skip("only some ways can do this")
    for dtype in DTYPES[:2]:
        for shape in ((1024, 3072), (1000, 1096)):  # tiles fit, and do not
            product = Product(CASES[case], *shape, dtype, CUDA)
            for tokens in sorted({1, way.tokens // 2 + 1, way.tokens}):
                if tokens <= way.tokens:
                    product.check(way, tokens, ROUNDING[dtype])


@pytest.mark.usefixtures("starts")
def test_a_split_product_repeats_in_a_graph() -> None:
    product = Product(CASES["plain"], 1024, 4096, torch.bfloat16, CUDA)
    way = Tiles(tokens=16, rows=64, columns=128, split=8)
    x = product.input(7)
    expected = product.multiply(way, x)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        results = [product.multiply(way, x) for _ in range(20)]
    for _ in range(5):
        for result in results:
            result.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(result, expected) for result in results)
    assert not product.counts.any()


@pytest.mark.usefixtures("starts")
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 16, 17, 64, 65, 300])
@pytest.mark.parametrize("shape", [(1024, 2048), (4096, 1024), (6144, 4096), (1000, 576)], ids=str)
def test_a_layer_gives_the_same_whichever_way_it_takes(shape: tuple[int, int], tokens: int, dtype: torch.dtype) -> None:
    outputs, inputs = shape
    weight, offset = torch.randn(*shape, device=CUDA) / inputs**0.5, torch.randn(outputs, device=CUDA)
    weight, offset = weight.to(dtype), offset.to(dtype)
    norm = RmsNorm(torch.randn(inputs, device=CUDA).to(dtype), 1e-5)
    x = torch.randn(tokens, inputs, device=CUDA).to(dtype)
    residual = torch.randn(tokens, outputs, device=CUDA).to(dtype)
    for bias, before in ((None, None), (offset, norm)):
        layer = linear.make(weight, bias, before)
        assert isinstance(layer, GpuLinear)
        plain = PlainLinear(weight.float(), None if bias is None else bias.float())
        wide = x.float() if before is None else rms_norm_reference(x.float(), norm.weight, 1e-5)
        rounding = 2 * ROUNDING[dtype]  # the library rounds before what is not fused
        close(layer(x), plain(wide), rounding)
        close(layer.plus(x, residual.clone()), plain.plus(wide, residual.float()), rounding)
        close(layer.gated(x, SILU), gated(plain(wide), SILU), 2 * rounding)
        close(layer.gated(x, GELU), gated(plain(wide), GELU), 2 * rounding)


def test_every_choice_has_room_and_runs() -> None:
    for outputs, inputs in ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (6144, 4096), (4096, 14336)):
        for tokens in (1, 2, 3, 4, 5, 8, 16, 17, 33, 64):
            way = choose(tokens, outputs, inputs)
            if way is not None:
                assert way.tokens >= tokens
                Product(CASES["plain"], outputs, inputs, torch.bfloat16, CUDA).check(way, tokens, 6e-3)


def test_float32_is_left_to_the_library() -> None:
    assert isinstance(linear.make(torch.randn(8, 8, device=CUDA)), PlainLinear)
