"""Mixtures of experts: the layer against a naive loop, models against dense ones and against transformers, served."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from radixlm import Engine
from radixlm.base.errors import StartupError
from radixlm.checkpoint.cache import Cache
from radixlm.checkpoint.locate import locate
from radixlm.layers import moe as layer
from radixlm.layers.mlp import FeedForward, GatedMlp, MergedMlp
from radixlm.layers.moe import MoeSpec
from radixlm.layers.source import Source
from radixlm.models import mixtral, qwen3_moe, table
from radixlm.models.experts import ExpertWeights
from radixlm.models.load import DummyWeights, open_weights
from radixlm.ops.activation import GELU, SILU, Activation
from radixlm.ops.grouped import Shape
from radixlm.parallel.shares import Cut
from support import tiny, upcycle
from support.gguf_file import NUMBERS, scored_tokenizer, small_weights, write_model
from support.mixtures import CPU, ROADS, SIZES, Bank, error
from support.models import packaged

GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 8000, "threads": 1}


class Tensors:
    """A layer's checkpoint in memory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)
        self.read: list[str] = []

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def get(self, name: str, shape: tuple[int, ...] | None = None, part: Cut | None = None) -> torch.Tensor:
        assert tuple(self._tensors[name].shape) == shape
        assert part is None, "nothing of this is cut"
        self.read.append(name)
        return self._tensors[name]


def make(bank: Bank, shared: Mapping[str, torch.Tensor] | None = None) -> tuple[layer.MoeMlp, Source]:
    """The layer of a bank, with a router that hands its input's first numbers on as scores."""
    shape = bank.shape
    tensors = {"m.gate.weight": torch.eye(shape.experts, shape.hidden, dtype=bank.dtype), **(shared or {})}
    for expert in range(shape.experts):
        gate, up = bank.gate_up[expert].chunk(2)
        parts = {"gate": gate, "up": up, "down": bank.down[expert]}
        tensors |= {f"m.experts.{expert}.{part}_proj.weight": tensor for part, tensor in parts.items()}
    source = Source(Tensors(tensors), bank.dtype, CPU)
    spec = MoeSpec(
        experts=shape.experts, active=shape.active, inner=shape.inner, renormalise=bank.renormalise,
        layers=frozenset({0}), shared=len(shared["m.shared_expert.up_proj.weight"]) if shared else 0,
    )  # fmt: skip

    def mlp(name: str, inner: int) -> FeedForward:
        gate, up = (source.linear([f"{name}.{part}_proj"], [inner], shape.hidden) for part in ("gate", "up"))
        down = source.linear([f"{name}.down_proj"], [shape.hidden], inner)
        if source.packs:
            return GatedMlp(gate, up, down, bank.activation)
        merged = source.linear([f"{name}.gate_proj", f"{name}.up_proj"], [inner, inner], shape.hidden)
        return MergedMlp(merged, down, bank.activation)

    return layer.build(spec, source, "m", shape.hidden, bank.activation, mlp), source


def scored(bank: Bank, tokens: int, road: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs that carry their scores in front."""
    x, residual, scores = bank.inputs(tokens, road)
    x[:, : bank.shape.experts] = scores
    return x, residual, scores


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_layer_equals_a_naive_loop(size: tuple[int, int], road: str) -> None:
    bank = Bank(Shape(*size, hidden=size[0] + 20, inner=12), torch.float32, renormalise=road != "few")
    mlp, _ = make(bank)
    for tokens in (1, 2, 17, 300):
        x, residual, scores = scored(bank, tokens, road)
        assert error(mlp(x), bank.expected(x, scores)) < 1e-5
        assert error(mlp.plus(x, residual.clone()), bank.expected(x, scores, residual)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", [SILU, GELU], ids=lambda function: function.name)
def test_the_layer_in_16_bits(activation: Activation, dtype: torch.dtype) -> None:
    bank = Bank(Shape(8, 2, hidden=64, inner=48), dtype, activation=activation)
    mlp, _ = make(bank)
    x, residual, scores = scored(bank, 40, "anywhere")
    rounding = {torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    assert error(mlp(x), bank.expected(x, scores)) < rounding
    assert error(mlp.plus(x, residual.clone()), bank.expected(x, scores, residual)) < rounding


def test_an_expert_that_all_tokens_share() -> None:
    bank = Bank(Shape(6, 2, hidden=30, inner=12), torch.float32)
    random_weights = Bank(Shape(1, 1, hidden=30, inner=20), torch.float32)
    gate, up = random_weights.gate_up[0].chunk(2)
    down, weight = random_weights.down[0], torch.randn(1, 30)
    mlp, source = make(
        bank,
        {
            "m.shared_expert.gate_proj.weight": gate, "m.shared_expert.up_proj.weight": up,
            "m.shared_expert.down_proj.weight": down, "m.shared_expert_gate.weight": weight,
        },
    )  # fmt: skip
    x, residual, scores = scored(bank, 9, "anywhere")
    shared = torch.sigmoid(x @ weight.t()) * F.linear(F.silu(x @ gate.t()) * (x @ up.t()), down)
    assert error(mlp(x), bank.expected(x, scores) + shared.double()) < 1e-5
    assert error(mlp.plus(x, residual.clone()), bank.expected(x, scores, residual) + shared.double()) < 1e-5
    assert source.parameters >= bank.gate_up.numel() + bank.down.numel() + 3 * down.numel() + weight.numel()


def test_experts_without_tokens_are_not_touched() -> None:
    from radixlm.ops.moe import GroupedMixture

    asked: list[tuple[int, int]] = []

    def expert(index: int) -> Any:
        def compute(x: torch.Tensor) -> torch.Tensor:
            asked.append((index, len(x)))
            return x * index

        return compute

    mixture = GroupedMixture([expert(index) for index in range(50)], 2, True)
    scores = torch.full((4, 50), -10.0)
    scores[:, 7], scores[:3, 30], scores[3, 2] = 5.0, 4.0, 4.0
    x = torch.randn(4, 3)
    mixture(x, scores)
    assert asked == [(2, 1), (7, 4), (30, 3)]


def test_random_weights_need_no_names() -> None:
    config = tiny.config(
        architectures=["Qwen3MoeForCausalLM"], num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
        decoder_sparse_step=2, vocab_size=100,
    )  # fmt: skip
    model = qwen3_moe.build(config, DummyWeights(torch.float32, 0), torch.float32, CPU)
    hidden, attention, norms = 64, 2 * 64 * 64 + 2 * 64 * 32, 2 * 64 + 2 * 16
    dense, sparse = 3 * hidden * 128, 4 * 3 * hidden * 24 + 4 * hidden  # the second layer is a mixture
    assert model.parameter_count() == 2 * 100 * hidden + hidden + 2 * (attention + norms) + dense + sparse


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 5}, r"num_experts_per_tok \(5\) is more than the number of experts \(4\)"),
        ({"num_local_experts": 0}, "num_local_experts is 0; it must be a whole number of at least 1"),
        ({"sliding_window": "wide"}, "sliding_window is 'wide'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_config_that_cannot_be_right_is_explained(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        mixtral.spec(tiny.config(**{"num_local_experts": 4, **changes}))
    with pytest.raises(StartupError, match=r"mlp_only_layers is \[0\.5\]; it must be a list of whole numbers"):
        qwen3_moe.spec(tiny.config(mlp_only_layers=[0.5]))


def test_experts_stacked_in_one_tensor() -> None:
    """As transformers keeps them in memory and can save them; the router is then under `mlp` in Mixtral too."""
    whole, down = torch.randn(3, 10, 4), torch.randn(3, 4, 5)
    stacked = Tensors(
        {"l.mlp.experts.gate_up_proj": whole, "l.mlp.experts.down_proj": down, "l.mlp.gate.weight": torch.ones(3, 4)}
    )
    weights = ExpertWeights(stacked, 3, mixtral.NAMES)
    assert torch.equal(weights.get("l.mlp.experts.1.gate_proj.weight", (5, 4)), whole[1, :5])
    assert torch.equal(weights.get("l.mlp.experts.2.up_proj.weight", (5, 4)), whole[2, 5:])
    assert torch.equal(weights.get("l.mlp.experts.0.down_proj.weight", (4, 5)), down[0])
    assert torch.equal(weights.get("l.mlp.experts.2.up_proj.weight", (5, 4), Cut(0, 3, 2)), whole[2, 8:])
    assert torch.equal(weights.get("l.mlp.experts.0.down_proj.weight", (4, 5), Cut(1, 1, 2)), down[0, :, 1:3])
    assert torch.equal(weights.get("l.mlp.gate.weight", (3, 4)), torch.ones(3, 4))
    with pytest.raises(AssertionError):
        ExpertWeights(stacked, 4).get("l.mlp.experts.0.down_proj.weight", (4, 5))


@pytest.mark.parametrize("architecture", ["llama", "qwen2moe", "qwen3moe"])
def test_a_mixture_from_gguf(tmp_path: Path, architecture: str) -> None:
    """What a converted file holds is what its model asks for, all of it."""
    inner = 32 if architecture == "llama" else 12
    numbers = {
        **NUMBERS, "feed_forward_length": inner, "expert_count": 4, "expert_used_count": 2,
        "expert_feed_forward_length": inner, "expert_shared_feed_forward_length": 20,
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        "gate_inp": (4, 8), "gate_exps": (4, inner, 8), "up_exps": (4, inner, 8), "down_exps": (4, 8, inner),
    }  # fmt: skip
    if architecture == "qwen2moe":
        shapes |= {"gate_inp_shexp": (8,), "gate_shexp": (20, 8), "up_shexp": (20, 8), "down_shexp": (8, 20)}
    weights = {name: values for name, values in small_weights().items() if ".ffn_" not in name or "norm" in name}
    rng = np.random.default_rng(0)
    weights |= {f"blk.0.ffn_{name}.weight": rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    if architecture == "qwen2moe":
        weights |= {f"blk.0.attn_{part}.bias": np.ones(8 if part == "q" else 4, np.float32) for part in "qkv"}
    if architecture == "qwen3moe":
        weights |= {f"blk.0.attn_{part}_norm.weight": np.ones(4, np.float32) for part in "qk"}
    path = write_model(tmp_path / "m.gguf", architecture, weights, numbers, scored_tokenizer())
    checkpoint = locate(str(path), None, None, lambda stage, fraction: None, Cache(tmp_path / "cache"))
    stored = open_weights(checkpoint, "gguf", 0)
    model = table.find(checkpoint.config).build(checkpoint.config, stored, torch.float32, CPU)
    assert model.parameter_count() == sum(stored.get(name).numel() for name in stored.names())


# ---- served


def prompts(count: int, vocab: int = 49152, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(5, vocab), k=rng.randrange(1, 40)) for _ in range(count)]


def answers(engine: Engine, asked: Sequence[Sequence[int]], **sampling: Any) -> list[list[int]]:
    got = engine.generate(input_ids=[list(prompt) for prompt in asked], sampling_params={**GREEDY, **sampling})
    return [answer["output_ids"] for answer in got]


def check_served(path: Path, asked: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> None:
    """Together and alone, cold and warm."""
    with Engine(model=str(path), **OPTIONS) as engine:
        assert answers(engine, asked) == expected
        assert answers(engine, asked) == expected
        for prompt, answer in list(zip(asked, expected, strict=True))[:3]:
            assert answers(engine, [prompt]) == [answer]
        engine.flush_cache()
        assert answers(engine, asked[:1]) == expected[:1]
        assert engine.audit()["leased"] == 0


@pytest.mark.parametrize(("experts", "active"), [(4, 2), (16, 5)])
@pytest.mark.parametrize(
    ("dense", "architecture"), [(dense, each) for dense, several in upcycle.FAMILIES.items() for each in several]
)
def test_equal_experts_say_what_the_dense_model_says(
    tmp_path: Path, dense: str, architecture: str, experts: int, active: int
) -> None:
    config = tiny.config(architectures=[dense], model_type=dense.removesuffix("ForCausalLM").lower())
    weights = {name: torch.from_numpy(values) for name, values in tiny.random_weights(config).items()}
    if dense == "Qwen3ForCausalLM":
        for index in range(config["num_hidden_layers"]):
            at = f"model.layers.{index}.self_attn"
            weights |= {f"{at}.q_norm.weight": torch.rand(16) + 0.5, f"{at}.k_norm.weight": torch.rand(16) + 0.5}
    asked = prompts(16)
    with Engine(model=str(upcycle.write(tmp_path / "dense", config, weights)), **OPTIONS) as engine:
        expected = answers(engine, asked)
    made = upcycle.upcycled(config, weights, architecture, experts, active)
    check_served(upcycle.write(tmp_path / "experts", *made), asked, expected)


@pytest.mark.timeout(600)
def test_the_default_model_with_four_equal_experts(tmp_path: Path) -> None:
    source = packaged()
    stored = open_weights(source, "auto", 0)
    weights = {name: stored.get(name) for name in stored.names()}
    asked = prompts(4)
    with Engine(model="smollm2", **OPTIONS) as engine:
        expected = answers(engine, asked, max_new_tokens=24)
    made = upcycle.upcycled(source.config, weights, "MixtralForCausalLM", experts=4, active=2)
    path = upcycle.write(tmp_path / "experts", *made)
    with Engine(model=str(path), **OPTIONS) as engine:
        assert answers(engine, asked, max_new_tokens=24) == expected
        assert answers(engine, asked, max_new_tokens=24) == expected


def test_random_weights_are_served(tmp_path: Path) -> None:
    config = tiny.config(
        architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", num_experts=16, num_experts_per_tok=4,
        moe_intermediate_size=24,
    )  # fmt: skip
    path = tiny.write(tmp_path / "m", config, None)
    found = []
    for dtype in ("float32", "bfloat16"):
        with Engine(model=str(path), load_format="dummy", **{**OPTIONS, "dtype": dtype}) as engine:
            found.append(answers(engine, prompts(5)))
            assert [len(answer) for answer in found[-1]] == [GREEDY["max_new_tokens"]] * 5
    with Engine(model=str(path), load_format="dummy", **OPTIONS) as engine:
        assert answers(engine, prompts(5)) == found[0]


@pytest.mark.filterwarnings("ignore")  # what transformers says of tiny models
@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_greedy_text_equals_that_of_transformers(tmp_path: Path, model_type: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        model_type, vocab_size=199, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, head_dim=16,
        shared_expert_intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=8, num_experts=8, num_experts_per_tok=3, norm_topk_prob=model_type == "qwen3_moe",
        max_position_embeddings=256, eos_token_id=7, bos_token_id=1, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(1)
    reference = AutoModelForCausalLM.from_config(config).float().eval()
    path = tiny.write(tmp_path / "m", {}, None)
    reference.save_pretrained(path)
    asked = prompts(16, 199)
    expected = []
    with torch.inference_mode():
        for prompt in asked:
            tokens = list(prompt)
            for _ in range(GREEDY["max_new_tokens"]):
                tokens.append(int(reference(torch.tensor([tokens])).logits[0, -1].argmax()))
            expected.append(tokens[len(prompt) :])
    check_served(path, asked, expected)
