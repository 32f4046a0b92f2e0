"""Mixtures of experts on a GPU: the kernels, compiled, against a naive loop in float64; in a CUDA graph; served."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from radixlm.layers import moe as layer
from radixlm.layers.mlp import FeedForward
from radixlm.layers.moe import MoeSpec
from radixlm.layers.source import Source
from radixlm.models.load import DummyWeights
from radixlm.ops import gpu, grouped, moe
from radixlm.ops.activation import SILU
from radixlm.ops.grouped import Shape, Tiles, Way
from radixlm.ops.moe import GpuMixture
from support.mixtures import ROADS, SIZES, Bank, error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
#: Of the worst token.
ROUNDING = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
WAYS = [
    Way(16, Tiles(16, 256, warps=2), Tiles(32, 128)),
    Way(16, Tiles(64, 64), Tiles(64, 128, stages=3)),
    Way(32, Tiles(64, 64), Tiles(128, 64)),
    Way(64, Tiles(64, 64), Tiles(128, 64)),
    Way(128, Tiles(128, 64, warps=8, stages=3), Tiles(128, 64, warps=8)),
]


@pytest.fixture(params=[False, True], ids=["in turn", "early"])
def starts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels one after the other, and each beginning while the one before it ends."""
    monkeypatch.setattr(gpu, "EARLY", request.param)
    yield
    torch.cuda.synchronize()


def mixture(bank: Bank) -> GpuMixture:
    return GpuMixture(bank.gate_up, bank.down, bank.shape.active, bank.renormalise, bank.activation)


@pytest.mark.usefixtures("starts")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_equals_the_loop(size: tuple[int, int], road: str, dtype: torch.dtype) -> None:
    """Widths that no tile fits, and such as all do."""
    for hidden, inner in ((200, 88), (256, 256)):
        bank = Bank(Shape(*size, hidden, inner), dtype, CUDA, renormalise=road != "few")
        for tokens in (1, 2, 33, 300):
            x, residual, scores = bank.inputs(tokens, road)
            made, expected = mixture(bank), bank.expected(x, scores)
            assert error(made(x, scores), expected) < ROUNDING[dtype]
            added = made.plus(x, scores, residual.clone())
            assert error(added, expected + residual.cpu().double()) < ROUNDING[dtype]


@pytest.mark.usefixtures("starts")
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_way(way: Way) -> None:
    from radixlm.ops import triton_moe

    for hidden, inner in ((1096, 520), (1024, 768)):
        bank = Bank(Shape(8, 2, hidden, inner), torch.bfloat16, CUDA)
        for tokens in (1, 65, 300):
            x, _, scores = bank.inputs(tokens)
            got = triton_moe.mixture(
                x, scores, bank.gate_up, bank.down, way, active=2, renormalise=True, activation="silu"
            )
            assert error(got, bank.expected(x, scores)) < ROUNDING[torch.bfloat16]


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("tokens", [1, 16, 17, 300, 5000])
def test_routing_and_blocks(road: str, tokens: int) -> None:
    from radixlm.ops import triton_moe

    for size in SIZES:
        shape = Shape(*size, 8, 8)
        _, _, scores = Bank(shape, torch.float32, CUDA).inputs(tokens, road)
        routed = triton_moe.route(scores, shape.active, True)
        chosen, weights = moe.route(scores, shape.active, True)
        assert torch.equal(routed.experts.long(), chosen)
        torch.testing.assert_close(routed.weights, weights)
        order, owners, sizes = (part.cpu() for part in triton_moe.place(routed, shape, 64))
        experts = routed.experts.flatten().cpu()
        got = []
        for index, (owner, count) in enumerate(zip(owners.tolist(), sizes.tolist(), strict=True)):
            entries = order[index * 64 : index * 64 + count]
            assert (experts[entries.long()] == owner).all()
            got.append(entries)
        assert torch.equal(torch.cat(got).long(), experts.argsort(stable=True))


def test_scores_that_are_not_finite_harm_their_token_alone() -> None:
    bank = Bank(Shape(128, 8, 256, 128), torch.bfloat16, CUDA)
    x, _, scores = bank.inputs(20)
    clean = mixture(bank)(x, scores)
    x[3], scores[3], scores[7, 5] = torch.nan, torch.nan, torch.inf
    got = mixture(bank)(x, scores)
    assert (~got.isfinite()).any(1).nonzero().flatten().tolist() == [3, 7]
    others = [row for row in range(20) if row not in (3, 7)]
    assert error(got[others], clean[others].cpu().double()) < 1e-2


@pytest.mark.usefixtures("starts")
@pytest.mark.parametrize("shape", [Shape(128, 8, 512, 256), Shape(8, 2, 1024, 896)], ids=str)
@pytest.mark.parametrize("tokens", [1, 16, 64, 256])
def test_a_graph_follows_its_inputs(tokens: int, shape: Shape) -> None:
    """One capture, replayed with tokens that go elsewhere: nothing depends on where they went at first."""
    bank = Bank(shape, torch.bfloat16, CUDA)
    made = mixture(bank)
    x, _, scores = bank.inputs(tokens)
    made(x, scores)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = made(x, scores)
    for road in ROADS:
        other, _, others = bank.inputs(tokens, road)
        x.copy_(other.flip(0))
        scores.copy_(others.flip(0))
        expected = made(x, scores)
        for _ in range(3):
            result.fill_(torch.nan)
            graph.replay()
            assert torch.equal(result, expected)


def test_a_long_prompt_goes_through_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    bank = Bank(Shape(16, 4, 256, 128), torch.bfloat16, CUDA)
    x, residual, scores = bank.inputs(1000)
    whole = mixture(bank).plus(x, scores, residual.clone())
    monkeypatch.setattr(moe, "MOST_TOKENS", 300)
    assert error(mixture(bank).plus(x, scores, residual.clone()), whole.cpu().double()) < ROUNDING[torch.bfloat16]


@pytest.mark.parametrize("bits", [16, 32])
def test_every_choice_runs(bits: int) -> None:
    dtype = {16: torch.bfloat16, 32: torch.float32}[bits]
    for shape in (Shape(128, 8, 1024, 384), Shape(8, 2, 2048, 896), Shape(60, 4, 1024, 704)):
        bank = Bank(shape, dtype, CUDA)
        ways = {grouped.choose(tokens, shape, bits): tokens for tokens in (4096, 2048, 1024, 512, 256, 64, 16, 1)}
        for tokens in ways.values():
            x, _, scores = bank.inputs(tokens)
            got = mixture(bank)(x, scores)
            some = slice(0, tokens, max(1, tokens // 10))
            assert error(got[some], bank.expected(x[some], scores[some])) < ROUNDING[dtype]


def test_weights_are_stacked_in_place() -> None:
    """Loading needs room for one copy, and for little more than one expert beside it."""
    spec = MoeSpec(experts=32, active=4, inner=256, renormalise=True, layers=frozenset({0}))
    source = Source(DummyWeights(torch.bfloat16, 0, CUDA), torch.bfloat16, CUDA)

    def none(name: str, inner: int) -> FeedForward:
        raise AssertionError("experts are stacked here")

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    made = layer.build(spec, source, "m", 1024, SILU, none)
    whole = 3 * 32 * 256 * 1024 * 2
    assert torch.cuda.max_memory_allocated() - before < 1.2 * whole
    assert made(torch.randn(5, 1024, device=CUDA, dtype=torch.bfloat16)).isfinite().all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_the_default_model_with_equal_experts(tmp_path: Path, graphs: bool, dtype: str) -> None:
    """Greedy tokens of the dense model in float32; in bfloat16 it runs, captured or not, and answers stay alike."""
    from radixlm import Engine
    from radixlm.models.load import open_weights
    from support import upcycle
    from support.models import packaged

    source = packaged()
    stored = open_weights(source, "auto", 0)
    weights = {name: stored.get(name) for name in stored.names()}
    made = upcycle.upcycled(source.config, weights, "MixtralForCausalLM", experts=4, active=2)
    path = upcycle.write(tmp_path / "experts", *made)
    asked = [list(range(100 + 7 * row, 130 + 9 * row)) for row in range(8)]
    sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    options = {"dtype": dtype, "device": "cuda", "disable_cuda_graph": not graphs, "max_total_tokens": 8000}
    found = []
    for model in ("smollm2", str(path)):
        with Engine(model=model, **options) as engine:
            got = engine.generate(input_ids=asked, sampling_params=sampling)
            found.append([answer["output_ids"] for answer in got])
    if dtype == "float32":
        assert found[0] == found[1]
    else:
        first = [(a[0], b[0]) for a, b in zip(*found, strict=True)]
        assert sum(a == b for a, b in first) >= 5
