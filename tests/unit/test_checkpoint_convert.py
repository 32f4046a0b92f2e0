"""GGUF to a Hugging Face directory: names, order of rows, config, tokenizers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from radixlm.base.errors import StartupError
from radixlm.checkpoint.convert import convert
from radixlm.checkpoint.gguf import open_gguf
from radixlm.checkpoint.gguf_config import hf_config, llama3_divisors
from radixlm.checkpoint.gguf_weights import halves_order
from support.gguf_file import NUMBERS, Array, byte_level_tokenizer, scored_tokenizer, small_weights, write_model

Json = dict[str, Any]


def converted(
    tmp_path: Path,
    architecture: str = "llama",
    weights: Mapping[str, Array] | None = None,
    numbers: Mapping[str, Any] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
    bare: bool = False,
) -> Path:
    source = write_model(
        tmp_path / "m.gguf", architecture, weights or small_weights(), {**NUMBERS, **(numbers or {})},
        tokenizer or scored_tokenizer(),
    )  # fmt: skip
    target = tmp_path / "out"
    target.mkdir()
    heard: list[float] = []
    convert(source, target, tokenizer=not bare, report=heard.append)
    assert heard == sorted(heard) and heard[-1] == 1.0
    return target


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def interleaved(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """How llama.cpp stores rows of q and k: those of the two rotary halves take turns."""
    half = len(rows) // heads // 2
    return rows.reshape(heads, 2, half, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def test_llama_rows_are_put_back_and_the_rest_is_as_it_was(tmp_path: Path) -> None:
    original = small_weights()
    stored = dict(original)
    for name, heads in (("blk.0.attn_q.weight", 2), ("blk.0.attn_k.weight", 1)):
        stored[name] = interleaved(original[name], heads)
    bias = np.arange(8, dtype=np.float32)
    stored["blk.0.attn_q.bias"] = interleaved(bias, 2)
    target = converted(tmp_path, weights=stored)
    found = load_file(target / "model.safetensors")
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "model.layers.0.input_layernorm.weight": "blk.0.attn_norm.weight",
        "model.layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
        "model.layers.0.self_attn.q_proj.weight": "blk.0.attn_q.weight",
        "model.layers.0.self_attn.k_proj.weight": "blk.0.attn_k.weight",
        "model.layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
        "model.layers.0.self_attn.o_proj.weight": "blk.0.attn_output.weight",
        "model.layers.0.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
        "model.layers.0.mlp.up_proj.weight": "blk.0.ffn_up.weight",
        "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
    }
    assert set(found) == {*names, "model.layers.0.self_attn.q_proj.bias"}
    for name, theirs in names.items():
        np.testing.assert_array_equal(found[name], original[theirs], err_msg=name)
    np.testing.assert_array_equal(found["model.layers.0.self_attn.q_proj.bias"], bias)
    config = read(target / "config.json")
    assert config["torch_dtype"] == "float32"  # the file's own type is kept
    assert config["attention_bias"] is True and config["tie_word_embeddings"] is True


@pytest.mark.parametrize(("rows", "heads"), [(8, 1), (8, 2), (96, 3), (4, 2)])
def test_halves_order_undoes_the_interleaving(rows: int, heads: int) -> None:
    original = np.arange(rows, dtype=np.float32)
    np.testing.assert_array_equal(interleaved(original, heads)[halves_order(rows, heads)], original)


def test_llama_config(tmp_path: Path) -> None:
    weights = {**small_weights(), "output.weight": small_weights(seed=1)["token_embd.weight"]}
    config = read(converted(tmp_path, weights=weights) / "config.json")
    assert config == {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 300, "hidden_size": 8,
        "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 4, "max_position_embeddings": 64, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
        "rope_scaling": None, "tie_word_embeddings": False, "use_cache": True, "hidden_act": "silu",
        "attention_bias": False, "mlp_bias": False, "torch_dtype": "float32",
        "bos_token_id": 1, "eos_token_id": [2],
    }  # fmt: skip


def test_gemma3_norms_config_and_names(tmp_path: Path) -> None:
    weights = small_weights()
    for name in ("post_attention_norm", "post_ffw_norm"):
        weights[f"blk.0.{name}.weight"] = np.full(8, 1.5, np.float32)
    weights["blk.0.attn_q_norm.weight"] = weights["blk.0.attn_k_norm.weight"] = np.full(4, 1.25, np.float32)
    numbers = {"block_count": 7, "attention.sliding_window": 512, "rope.freq_base": 1e6, "attention.key_length": 4}
    target = converted(tmp_path, "gemma3", weights, numbers)
    found, config = load_file(target / "model.safetensors"), read(target / "config.json")
    layer = "model.layers.0."
    np.testing.assert_array_equal(found[layer + "post_attention_layernorm.weight"], np.full(8, 0.5, np.float32))
    np.testing.assert_array_equal(found[layer + "post_feedforward_layernorm.weight"], np.full(8, 0.5, np.float32))
    np.testing.assert_array_equal(found[layer + "self_attn.k_norm.weight"], np.full(4, 0.25, np.float32))
    for ours, theirs in (("pre_feedforward_layernorm", "ffn_norm"), ("input_layernorm", "attn_norm")):
        np.testing.assert_array_equal(found[f"{layer}{ours}.weight"], weights[f"blk.0.{theirs}.weight"] - 1)
    np.testing.assert_array_equal(found["model.norm.weight"], weights["output_norm.weight"] - 1)
    np.testing.assert_array_equal(found[layer + "self_attn.q_proj.weight"], weights["blk.0.attn_q.weight"])
    assert config["architectures"] == ["Gemma3ForCausalLM"] and config["model_type"] == "gemma3_text"
    assert config["layer_types"] == ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    assert (config["sliding_window"], config["rope_local_base_freq"], config["query_pre_attn_scalar"]) == (512, 1e4, 4)


#: Architecture -> (what the original calls router and matrices of an expert, has norms of heads, shares an expert).
_QWEN = ["mlp.gate", *(f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down"))]
_MIXTRAL = ["block_sparse_moe.gate", *(f"block_sparse_moe.experts.{{}}.{part}" for part in ("w1", "w3", "w2"))]
MIXTURES: dict[str, tuple[list[str], bool, bool]] = {
    "llama": (_MIXTRAL, False, False),
    "qwen2moe": (_QWEN, False, True),
    "qwen3moe": (_QWEN, True, False),
}


def mixture(architecture: str) -> tuple[dict[str, Array], Json]:
    """GGUF tensors and keys of three experts, of which each token goes through two."""
    random = np.random.default_rng(5)
    weights = {name: values for name, values in small_weights().items() if ".ffn_" not in name or "norm" in name}
    shapes: dict[str, tuple[int, ...]] = {"gate_inp": (3, 8), "gate_exps": (3, 6, 8), "up_exps": (3, 6, 8)}
    shapes["down_exps"] = (3, 8, 6)
    if architecture == "qwen2moe":
        shapes |= {"gate_shexp": (4, 8), "up_shexp": (4, 8), "down_shexp": (8, 4), "gate_inp_shexp": (8,)}
    weights |= {
        f"blk.0.ffn_{name}.weight": random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
    }
    if architecture == "qwen3moe":
        weights |= {f"blk.0.attn_{part}_norm.weight": np.ones(4, np.float32) for part in "qk"}
    numbers = {"expert_count": 3, "expert_used_count": 2, "expert_feed_forward_length": 6}
    return weights, {**numbers, "expert_shared_feed_forward_length": 4}


@pytest.mark.parametrize("architecture", MIXTURES)
def test_experts_get_names_of_their_own(architecture: str, tmp_path: Path) -> None:
    weights, numbers = mixture(architecture)
    target = converted(tmp_path, architecture, weights, numbers)
    found = load_file(target / "model.safetensors")
    (router, *parts), normed, shared = MIXTURES[architecture]
    layer = "model.layers.0."
    expected = {f"{layer}{router}.weight": weights["blk.0.ffn_gate_inp.weight"]}
    for part, theirs in zip(parts, ("gate", "up", "down"), strict=True):
        for expert in range(3):
            expected[f"{layer}{part.format(expert)}.weight"] = weights[f"blk.0.ffn_{theirs}_exps.weight"][expert]
    if shared:
        for theirs in ("gate", "up", "down"):
            expected[f"{layer}mlp.shared_expert.{theirs}_proj.weight"] = weights[f"blk.0.ffn_{theirs}_shexp.weight"]
        expected[f"{layer}mlp.shared_expert_gate.weight"] = weights["blk.0.ffn_gate_inp_shexp.weight"][None]
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)
    assert len(found) == len(expected) + 8 + 2 * normed
    # Rows of q take turns in files of Llama's shape.
    q = weights["blk.0.attn_q.weight"]
    stored = q[halves_order(8, 2)] if architecture == "llama" else q
    np.testing.assert_array_equal(found[f"{layer}self_attn.q_proj.weight"], stored)


def test_configs_of_mixtures(tmp_path: Path) -> None:
    found = {}
    for architecture in MIXTURES:
        weights, numbers = mixture(architecture)
        path = write_model(tmp_path / f"{architecture}.gguf", architecture, weights, {**NUMBERS, **numbers})
        found[architecture] = hf_config(open_gguf(path))
    mixtral, qwen2, qwen3 = found.values()
    assert (mixtral["architectures"], mixtral["model_type"]) == (["MixtralForCausalLM"], "mixtral")
    assert (mixtral["num_local_experts"], mixtral["num_experts_per_tok"], mixtral["sliding_window"]) == (3, 2, None)
    assert mixtral["intermediate_size"] == 16
    for config, name, renormalised in ((qwen2, "Qwen2Moe", False), (qwen3, "Qwen3Moe", True)):
        assert config["architectures"] == [f"{name}ForCausalLM"]
        assert (config["num_experts"], config["num_experts_per_tok"], config["moe_intermediate_size"]) == (3, 2, 6)
        assert config["norm_topk_prob"] is renormalised
    assert qwen2["shared_expert_intermediate_size"] == 4 and qwen2["qkv_bias"] is False


def test_a_stack_of_another_number_of_experts_is_named(tmp_path: Path) -> None:
    weights, numbers = mixture("qwen3moe")
    with pytest.raises(StartupError, match=r"'blk.0.ffn_gate_exps.weight' has the shape \[3, 6, 8\]; a stack of 4"):
        converted(tmp_path, "qwen3moe", weights, {**numbers, "expert_count": 4})


def test_matrices_of_several_types_become_bfloat16(tmp_path: Path) -> None:
    weights: dict[str, Any] = dict(small_weights())
    weights["blk.0.attn_v.weight"] = weights["blk.0.attn_v.weight"].astype(np.float16)
    target = converted(tmp_path, weights=weights)
    size = int.from_bytes((target / "model.safetensors").read_bytes()[:8], "little")
    head = json.loads((target / "model.safetensors").read_bytes()[8 : 8 + size])
    assert {item["dtype"] for name, item in head.items() if name != "__metadata__"} == {"BF16"}
    assert read(target / "config.json")["torch_dtype"] == "bfloat16"


SCALINGS: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
    ({}, None),
    ({"rope.scaling.type": "none"}, None),
    ({"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}, {"rope_type": "linear", "factor": 8.0}),
    ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
    (
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    ),
]


@pytest.mark.parametrize(("keys", "scaling"), SCALINGS)
def test_rope_scaling(keys: Json, scaling: Json | None, tmp_path: Path) -> None:
    assert read(converted(tmp_path, numbers=keys) / "config.json")["rope_scaling"] == scaling


def test_llama3_scaling_is_told_by_its_divisors(tmp_path: Path) -> None:
    rule = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}  # fmt: skip
    numbers = {**NUMBERS, "rope.freq_base": 500000.0, "attention.key_length": 64, "embedding_length": 128}
    weights = {"token_embd.weight": np.zeros((300, 128), np.float32)}
    weights["rope_freqs.weight"] = llama3_divisors(64, 500000.0, rule).astype(np.float32)
    path = write_model(tmp_path / "m.gguf", "llama", weights, numbers)
    assert hf_config(open_gguf(path))["rope_scaling"] == rule
    weights["rope_freqs.weight"] = np.linspace(1, 32, 32, dtype=np.float32)
    path = write_model(tmp_path / "n.gguf", "llama", weights, numbers)
    with pytest.raises(StartupError, match=r"rope_freqs\.weight"):
        hf_config(open_gguf(path))


WRONG: list[tuple[str, Json, Json, str]] = [
    ("phi3", {}, {}, "llama, qwen2, qwen2moe, qwen3, qwen3moe, gemma3"),
    ("llama", {"block_count": None}, {}, "llama.block_count is None"),
    ("qwen3", {"expert_count": 8}, {}, "mixture of experts of architecture 'qwen3', which is known as dense"),
    ("llama", {"expert_count": 8}, {}, "llama.expert_used_count is None"),
    ("llama", {"rope.dimension_count": 2}, {}, "rope.dimension_count is 2"),
    ("llama", {"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, {}, "longrope"),
    ("llama", {}, {"tokenizer": "rwkv"}, "its tokenizer model is 'rwkv'"),
    ("llama", {"embedding_length": 16}, {}, "rows of 16"),
]


@pytest.mark.parametrize(("architecture", "numbers", "tokenizer", "words"), WRONG)
def test_what_cannot_be_read_is_named(
    architecture: str, numbers: Json, tokenizer: Json, words: str, tmp_path: Path
) -> None:
    kept = {key: value for key, value in {**NUMBERS, **numbers}.items() if value is not None}
    words_of = scored_tokenizer(model=tokenizer["tokenizer"]) if tokenizer else scored_tokenizer()
    path = write_model(tmp_path / "m.gguf", architecture, small_weights(), kept, words_of)
    with pytest.raises(StartupError, match=words):
        convert(path, tmp_path, tokenizer=True, report=lambda done: None)
    assert not (tmp_path / "model.safetensors").exists()


def test_unknown_tensors_are_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"'blk.0.ssm_conv1d.weight' is not known in architecture 'llama'"):
        converted(tmp_path, weights={**small_weights(), "blk.0.ssm_conv1d.weight": np.zeros((8, 8), np.float32)})


def test_unknown_pre_tokenizers_are_named_and_need_not_matter(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer("viking")
    with pytest.raises(StartupError, match=r"'viking'.*smollm.*--tokenizer-path"):
        converted(tmp_path, tokenizer=tokenizer)
    other = tmp_path / "other"
    other.mkdir()
    target = converted(other, tokenizer=tokenizer, bare=True)
    assert (target / "model.safetensors").is_file() and not (target / "tokenizer.json").exists()


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "llama-bpe"])
def test_byte_level_vocabularies_cut_digits_as_their_models_do(pre: str, tmp_path: Path) -> None:
    target = converted(tmp_path, tokenizer=byte_level_tokenizer(pre))
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    cut = {"gpt-2": ["123", "4"], "smollm": list("1234"), "qwen2": list("1234"), "llama-bpe": ["123", "4"]}
    encoded = tokenizer.encode("1234", add_special_tokens=False)
    assert encoded.tokens == cut[pre]
    text = "e\u0301 ab<|im_end|>\n  dog's 漢字"
    back = tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False)
    start = "<|im_start|>" if pre == "llama-bpe" else ""  # Llama 3 begins every text with its start token
    assert back == start + (text.replace("e\u0301", "é") if pre == "qwen2" else text)
    assert tokenizer.token_to_id("[PAD]") is None  # padding of the embedding is no token
    assert tokenizer.encode("dog", add_special_tokens=False).tokens == ["dog"]


def test_scored_vocabularies_merge_the_best_first_and_fall_back_to_bytes(tmp_path: Path) -> None:
    target = converted(tmp_path, tokenizer=scored_tokenizer(["<0x-1>", "<0xZZ>"]))
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    assert tokenizer.encode("ab").tokens == ["<s>", "▁ab"]
    assert tokenizer.encode("é", add_special_tokens=False).tokens == ["▁", "<0xC3>", "<0xA9>"]
    for text in (" a", "a", "\n a", "é", "", "漢字 🙂"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    for odd in ("<0x-1>", "<0xZZ>"):  # no bytes, so text
        assert tokenizer.decode([tokenizer.token_to_id("a"), tokenizer.token_to_id(odd)]) == f"a{odd}"


def test_scored_vocabularies_without_a_space_in_front(tmp_path: Path) -> None:
    target = converted(
        tmp_path, tokenizer=scored_tokenizer(add_space_prefix=False, add_bos_token=False, add_eos_token=True)
    )
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    assert tokenizer.encode("ab ab").tokens == ["ab", "▁ab", "</s>"]
    assert tokenizer.decode(tokenizer.encode(" ab").ids) == " ab"


def test_tokenizer_and_generation_config(tmp_path: Path) -> None:
    templates = {"tokenizer.chat_template": "{{ messages }}", "tokenizer.chat_template.tool_use": "tools"}
    target = converted(tmp_path, tokenizer=byte_level_tokenizer("qwen2", eot_token_id=3, **templates))
    config = read(target / "tokenizer_config.json")
    assert (config["bos_token"], config["eos_token"], config["model_max_length"]) == ("<|im_start|>", "<|im_end|>", 64)
    assert {item["name"]: item["template"] for item in config["chat_template"]} == {
        "default": "{{ messages }}",
        "tool_use": "tools",
    }
    end = Tokenizer.from_file(str(target / "tokenizer.json")).token_to_id("<|im_end|>")
    assert read(target / "generation_config.json")["eos_token_id"] == [end, 3]
