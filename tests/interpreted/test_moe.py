"""The Triton kernels of mixtures of experts, interpreted, against a naive loop in float64."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from radixlm.layers import moe as layer
from radixlm.layers.mlp import MergedMlp
from radixlm.layers.moe import MoeSpec
from radixlm.layers.norm import RmsNorm
from radixlm.layers.source import Source
from radixlm.models.load import DummyWeights
from radixlm.ops import grouped, moe
from radixlm.ops.activation import ACTIVATIONS, SILU
from radixlm.ops.grouped import Shape, Tiles, Way, blocks
from radixlm.ops.moe import GpuMixture, GroupedMixture
from radixlm.parallel.base import Comm
from radixlm.parallel.local import ALONE, Alone
from support.mixtures import CPU, ROADS, Bank, error

#: (experts, experts of a token); every instruction is interpreted, so no more than show something of their own.
SIZES = [(4, 1), (8, 2), (16, 8), (60, 4)]
ROUNDING = {torch.float32: 1e-5, torch.float16: 4e-3}
SMALL = Way(16, Tiles(16, 16), Tiles(32, 32))
LARGE = Way(32, Tiles(32, 16, stages=2), Tiles(16, 64))


@pytest.fixture
def kernels() -> ModuleType:
    from radixlm.ops import triton_moe

    return triton_moe


def run(
    kernels: ModuleType, bank: Bank, way: Way, x: torch.Tensor, scores: torch.Tensor, into: torch.Tensor | None = None
) -> torch.Tensor:
    got: torch.Tensor = kernels.mixture(
        x, scores, bank.gate_up, bank.down, way, active=bank.shape.active, renormalise=bank.renormalise,
        activation=bank.activation.name, into=into,
    )  # fmt: skip
    return got


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("road", ROADS)
def test_routing(kernels: ModuleType, road: str, size: tuple[int, int]) -> None:
    experts, active = size
    for tokens in (1, 70):
        _, _, scores = Bank(Shape(experts, active, 4, 4), torch.float32).inputs(tokens, road)
        for renormalise in (False, True):
            routed = kernels.route(scores, active, renormalise)
            chosen, weights = moe.route(scores, active, renormalise)
            assert torch.equal(routed.experts.long(), chosen)
            torch.testing.assert_close(routed.weights, weights)
            assert torch.equal(routed.counts.sum(0)[:experts], chosen.flatten().bincount(minlength=experts))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, of what is tested
def test_scores_that_are_not_finite_choose_experts_that_exist(kernels: ModuleType) -> None:
    """Their weights are no numbers, so that the token comes to nothing; other tokens are as without them."""
    scores = torch.randn(6, 5)
    clean = kernels.route(scores, 3, True)
    scores[1, 2] = torch.nan
    scores[2] = torch.nan
    scores[3, 4] = torch.inf
    scores[4] = -torch.inf
    routed = kernels.route(scores, 3, True)
    assert ((routed.experts >= 0) & (routed.experts < 5)).all()
    assert all(len(set(row)) == 3 for row in routed.experts.tolist())
    assert routed.weights.isnan().any(1).tolist() == [False, False, True, True, True, False]
    assert kernels.route(scores, 3, False).weights.isnan().any(1).tolist() == [False, True, True, True, True, False]
    for row in (0, 5):
        assert torch.equal(routed.experts[row], clean.experts[row])
        assert torch.equal(routed.weights[row], clean.weights[row])


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("road", ROADS)
def test_blocks(kernels: ModuleType, road: str, size: tuple[int, int]) -> None:
    """Each entry is in one block, in order, in a block of its expert."""
    shape = Shape(*size, 4, 4)
    for tokens, block in ((1, 16), (37, 16), (70, 64)):
        _, _, scores = Bank(shape, torch.float32).inputs(tokens, road)
        routed = kernels.route(scores, shape.active, True)
        order, owners, sizes = kernels.place(routed, shape, block)
        expected = routed.experts.flatten().long().argsort(stable=True).tolist()
        got = []
        for index, (owner, count) in enumerate(zip(owners.tolist(), sizes.tolist(), strict=True)):
            assert 0 <= count <= block
            entries = order[index * block : index * block + count].tolist()
            assert (routed.experts.flatten()[entries] == owner).all()
            got += entries
        assert got == expected
        assert len(sizes) == blocks(tokens * shape.active, shape.experts, block)


@pytest.mark.parametrize(
    ("size", "road", "dtype"),
    [(size, "anywhere", torch.float16) for size in SIZES] + [((8, 2), road, torch.float32) for road in ROADS],
    ids=str,
)
def test_equals_the_loop(kernels: ModuleType, size: tuple[int, int], road: str, dtype: torch.dtype) -> None:
    """Widths that no tile fits."""
    bank = Bank(Shape(*size, hidden=40, inner=24), dtype)
    for tokens in (1, 9):
        x, residual, scores = bank.inputs(tokens, road)
        got = run(kernels, bank, SMALL, x, scores)
        assert got.dtype == dtype
        assert error(got, bank.expected(x, scores)) < ROUNDING[dtype]
        added = residual.clone()
        assert run(kernels, bank, LARGE, x, scores, into=added) is added
        assert error(added, bank.expected(x, scores, residual)) < ROUNDING[dtype]


@pytest.mark.parametrize("way", [SMALL, LARGE], ids=str)
def test_widths_that_tiles_fit(kernels: ModuleType, way: Way) -> None:
    bank = Bank(Shape(6, 3, hidden=128, inner=64), torch.float16, renormalise=False)
    x, _, scores = bank.inputs(21)
    got = run(kernels, bank, way, x, scores)
    assert error(got, bank.expected(x, scores)) < ROUNDING[torch.float16]
    assert torch.equal(got, run(kernels, bank, way, x, scores))


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
def test_activations(kernels: ModuleType, name: str) -> None:
    bank = Bank(Shape(4, 2, hidden=32, inner=16), torch.float32, activation=ACTIVATIONS[name])
    x, _, scores = bank.inputs(5)
    assert error(run(kernels, bank, SMALL, x, scores), bank.expected(x, scores)) < 1e-5


def test_a_token_gives_the_same_in_any_company(kernels: ModuleType) -> None:
    """The same tiles, other tokens beside it: not a bit differs."""
    bank = Bank(Shape(16, 4, hidden=40, inner=24), torch.float32)
    x, _, scores = bank.inputs(40)
    together = run(kernels, bank, SMALL, x, scores)
    for part in (slice(0, 1), slice(7, 20), slice(39, 40)):
        assert torch.equal(run(kernels, bank, SMALL, x[part], scores[part]), together[part])


def test_the_layer_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """`GpuMixture` chooses tiles and cuts what is too long; the reference is `GroupedMixture`."""
    bank = Bank(Shape(8, 2, hidden=32, inner=16), torch.float16)
    x, residual, scores = bank.inputs(23)
    whole = GpuMixture(bank.gate_up, bank.down, 2, True, SILU)(x, scores)
    monkeypatch.setattr(moe, "MOST_TOKENS", 9)
    gpu = GpuMixture(bank.gate_up, bank.down, 2, True, SILU)
    assert error(gpu(x, scores), whole.double()) < 2e-3
    assert error(gpu.plus(x, scores, residual.clone()), bank.expected(x, scores, residual)) < 4e-3
    assert gpu(x[:0], scores[:0]).shape == (0, 32)
    assert gpu.plus(x[:0], scores[:0], residual[:0]).shape == (0, 32)

    def expert(index: int) -> moe.Expert:
        gate_up, down = bank.gate_up[index].float(), bank.down[index].float()

        def compute(rows: torch.Tensor) -> torch.Tensor:
            gate, up = (rows @ gate_up.t()).chunk(2, -1)
            return (SILU.apply(gate) * up) @ down.t()

        return compute

    reference = GroupedMixture([expert(index) for index in range(8)], 2, True)
    assert error(whole, reference(x.float(), scores.float()).double()) < 4e-3


def test_a_whole_layer_over_stacked_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: experts are stacked while they are loaded, and the layer normalises its input by itself."""
    monkeypatch.setattr(layer, "has_kernels", lambda device: True)
    spec = MoeSpec(experts=5, active=2, inner=24, renormalise=True, layers=frozenset({0}), shared=16)
    source = Source(DummyWeights(torch.float16, 0), torch.float16, CPU)

    def mlp(name: str, inner: int) -> MergedMlp:
        assert name == "m.shared_expert"  # the others are stacked
        merged = source.linear([f"{name}.gate_proj", f"{name}.up_proj"], [inner, inner], 32)
        return MergedMlp(merged, source.linear([f"{name}.down_proj"], [32], inner), SILU)

    norm = RmsNorm(torch.rand(32) + 0.5, 1e-5)
    made = layer.build(spec, source, "m", 32, SILU, mlp, norm)
    assert source.parameters == 5 * 32 + 5 * 3 * 24 * 32 + 3 * 16 * 32 + 32
    assert source.bytes == 2 * source.parameters
    x = torch.randn(7, 32).half()
    rows = norm(x.float()).half().float()

    def weight(name: str, *shape: int) -> torch.Tensor:
        return DummyWeights(torch.float16, 0).get(f"m.{name}.weight", shape).float()

    def expert(name: str, inner: int) -> torch.Tensor:
        gate, up = (rows @ weight(f"{name}.{part}_proj", inner, 32).t() for part in ("gate", "up"))
        return SILU.apply(gate) * up @ weight(f"{name}.down_proj", 32, inner).t()

    chosen, weights = moe.route((rows @ weight("gate", 5, 32).t()).half(), 2, True)
    parts = torch.stack([expert(f"experts.{index}", 24) for index in range(5)], 1)
    expected = (torch.take_along_dim(parts, chosen[:, :, None], 1) * weights[:, :, None]).sum(1)
    expected += torch.sigmoid(rows @ weight("shared_expert_gate", 1, 32).t()) * expert("shared_expert", 16)
    # Random weights are small: so is what comes out, beside the steps of 16 bits.
    assert (made(x).float() - expected).norm() < 1e-2 * expected.norm()
    assert (made.plus(x, x.clone()).float() - expected - x.float()).abs().max() < 4e-3


class OnePart(Alone):
    """A rank whose sums over the ranks are its own part: what they add up is then for the test to add up."""

    size = 3

    def __init__(self, rank: int) -> None:
        self.rank = rank


def test_parts_of_a_layer_over_stacked_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank stacks its part of every expert; the parts add up to the layer, and the residual is added once."""
    monkeypatch.setattr(layer, "has_kernels", lambda device: True)
    spec = MoeSpec(experts=5, active=2, inner=24, renormalise=True, layers=frozenset({0}), shared=48)

    def build(comm: Comm) -> tuple[layer.MoeMlp, Source]:
        source = Source(DummyWeights(torch.float16, 0), torch.float16, CPU, comm)

        def mlp(name: str, inner: int) -> MergedMlp:
            merged = source.column([f"{name}.gate_proj", f"{name}.up_proj"], [inner, inner], 32)
            return MergedMlp(merged, source.row(f"{name}.down_proj", 32, inner, summed=False), SILU)

        return layer.build(spec, source, "m", 32, SILU, mlp), source

    (whole, everything), parts = build(ALONE), [build(OnePart(rank)) for rank in range(3)]
    experts = 2 * (5 * 24 + 48) * 3 * 32  # bytes
    for _, source in parts:
        assert source.parameters == everything.parameters
        assert everything.bytes - source.bytes == experts - experts // 3
    x, residual = torch.randn(7, 32).half(), torch.randn(7, 32).half()
    assert error(sum(part(x).double() for part, _ in parts), whole(x).double()) < 4e-3
    added = sum(part.plus(x, residual.clone()).double() for part, _ in parts)
    assert (added - whole.plus(x, residual.clone()).double()).abs().max() < 4e-3


@pytest.mark.parametrize("bits", [16, 32])
def test_the_rule_gives_ways_that_fit(bits: int) -> None:
    for shape in (Shape(128, 8, 2048, 768), Shape(8, 2, 4096, 14336), Shape(60, 4, 2048, 1408), Shape(4, 1, 64, 32)):
        last = 0
        for tokens in (1, 2, 16, 64, 256, 1024, 4096, 8192):
            way = grouped.choose(tokens, shape, bits)
            assert way.tokens >= last
            last = way.tokens
            for tiles, weights in ((way.gate_up, 2), (way.down, 1)):
                stage = (weights * tiles.rows + way.tokens) * tiles.columns * bits // 8
                assert stage * tiles.stages <= 227 << 10  # shared memory of a multiprocessor
    for entries, experts, size in ((1, 128, 16), (8, 128, 16), (512, 8, 64), (4096, 128, 128)):
        # One entry to each expert that there are entries for, all the rest to one more.
        worst = [1] * (min(entries, experts) - 1)
        worst.append(entries - len(worst))
        assert sum(-(-count // size) for count in worst) <= blocks(entries, experts, size)


def test_measured_ways_are_in_order() -> None:
    for steps in grouped.MEASURED.values():
        assert [most for most, _ in steps] == sorted({most for most, _ in steps})
