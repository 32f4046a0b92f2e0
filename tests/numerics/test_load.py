"""Weights out of files: exact, lazy, and clear when something is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import save_file

from radixlm.base.errors import StartupError
from radixlm.checkpoint.cache import Cache
from radixlm.checkpoint.checkpoint import Checkpoint
from radixlm.checkpoint.dequantize import to_bfloat16
from radixlm.checkpoint.locate import locate
from radixlm.models.load import DummyWeights, SafetensorsWeights, open_weights
from radixlm.parallel.shares import Cut
from support.gguf_file import NUMBERS, scored_tokenizer, small_weights, write_model
from support.models import packaged

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16"}
A, B = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), torch.ones(4)


def directory(path: Path, files: Mapping[str, Any]) -> Path:
    path.mkdir(exist_ok=True)
    for name, content in {"config.json": CONFIG, **files}.items():
        if name.endswith(".safetensors"):
            save_file(content, path / name)
        elif isinstance(content, bytes):
            (path / name).write_bytes(content)
        else:
            (path / name).write_text(json.dumps(content))
    return path


def index(**files: str) -> dict[str, Any]:
    return {"model.safetensors.index.json": {"weight_map": files}}


def found(path: Path) -> Checkpoint:
    return locate(str(path), None, None, lambda stage, fraction: None, Cache(path / "cache"))


def test_one_file_and_shards_give_the_same(tmp_path: Path) -> None:
    whole = found(directory(tmp_path / "whole", {"model.safetensors": {"a": A, "b": B}}))
    shards = {"model-1.safetensors": {"a": A}, "model-2.safetensors": {"b": B}, "stray.safetensors": {"a": B}}
    listed = index(a="model-1.safetensors", b="model-2.safetensors")
    parts = found(directory(tmp_path / "parts", {**shards, **listed}))
    for checkpoint in (whole, parts):
        weights = open_weights(checkpoint, "auto", 0)
        assert weights.names() == {"a", "b"}
        assert torch.equal(weights.get("a"), A) and torch.equal(weights.get("b", (4,)), B)
        assert weights.get("a", (2, 3)).dtype == torch.bfloat16


def test_what_an_index_leaves_out_of_its_own_files_does_not_count(tmp_path: Path) -> None:
    files = {"x.safetensors": {"a": A, "b": B}, "y.safetensors": {"b": B + 1}}
    listed = index(a="x.safetensors", b="y.safetensors")
    weights = open_weights(found(directory(tmp_path / "m", {**files, **listed})), "safetensors", 0)
    assert torch.equal(weights.get("b"), B + 1)


def test_the_language_model_of_a_multimodal_checkpoint(tmp_path: Path) -> None:
    names = {"language_model.model.layers.0.x": A, "language_model.lm_head.weight": B, "vision_tower.y": B + 1}
    weights = SafetensorsWeights(found(directory(tmp_path / "m", {"model.safetensors": names})).weight_files)
    assert weights.names() == {"model.layers.0.x", "lm_head.weight", "vision_tower.y"}
    assert torch.equal(weights.get("model.layers.0.x"), A)
    newer = directory(tmp_path / "n", {"model.safetensors": {"model.language_model.norm.weight": B}})
    assert SafetensorsWeights(found(newer).weight_files).names() == {"model.norm.weight"}


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a missing shard": ({"x.safetensors": {"a": A}, **index(a="x.safetensors", b="gone.safetensors")}, "gone"),
    "an index that lies": ({"x.safetensors": {"a": A}, **index(b="x.safetensors")}, "x.safetensors does not hold 'b'"),
    "a tensor twice": ({"model-1.safetensors": {"a": A}, "model-2.safetensors": {"a": A}}, "both in"),
    "no weights": ({}, "holds no weights"),
    "a quantised model": ({"config.json": {"quantization_config": {"quant_method": "gptq"}}}, "quantised .gptq"),
    "a pickle": ({"pytorch_model.bin": b"\x80\x04"}, "pytorch_model.bin, a pickle"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_directories(name: str, tmp_path: Path) -> None:
    files, words = WRONG[name]
    with pytest.raises(StartupError, match=words):
        open_weights(found(directory(tmp_path / "m", files)), "auto", 0)


@pytest.mark.parametrize("damage", ["empty", "cut", "no header", "noise"])
def test_damaged_files_are_named(damage: str, tmp_path: Path) -> None:
    path = directory(tmp_path / "m", {"model.safetensors": {"a": A, "b": B}})
    file = path / "model.safetensors"
    good = file.read_bytes()
    bad = {"empty": b"", "cut": good[:-1], "no header": b"\xff" * 64, "noise": good[:8] + b"{" * 64}[damage]
    file.write_bytes(bad)
    with pytest.raises(StartupError, match=r"model\.safetensors is not a safetensors file, or a damaged one"):
        open_weights(found(path), "auto", 0)


def test_missing_tensors_and_other_shapes_are_named(tmp_path: Path) -> None:
    weights = open_weights(found(directory(tmp_path / "m", {"model.safetensors": {"a": A}})), "auto", 0)
    with pytest.raises(StartupError, match=r"no tensor 'lm_head\.weight'"):
        weights.get("lm_head.weight")
    with pytest.raises(StartupError, match=r"'a' .* has the shape \[2, 3\], and the config asks for \[3, 2\]"):
        weights.get("a", (3, 2))


@pytest.mark.parametrize("part", [Cut(0, 1, 2), Cut(1, 4, 3), Cut(0, 0, 5), Cut(0, 5, 0)], ids=str)
def test_parts_of_tensors(part: Cut, tmp_path: Path) -> None:
    """From a file and from a generator: that part of the whole, and no more memory than it takes."""
    whole = torch.arange(35, dtype=torch.float32).reshape(5, 7)
    stored = open_weights(found(directory(tmp_path / "m", {"model.safetensors": {"a": whole}})), "auto", 0)
    for weights in (stored, DummyWeights(torch.float32, 1)):
        got = weights.get("a", (5, 7), part)
        assert torch.equal(got, weights.get("a", (5, 7)).narrow(part.dim, part.start, part.length))
        assert got.is_contiguous()
        mapped = weights is stored and part.dim == 0  # a view of the file
        assert mapped or got.untyped_storage().nbytes() == got.nbytes, "the rest is held too"
    with pytest.raises(StartupError, match=r"has the shape \[5, 7\]"):
        stored.get("a", (7, 5), part)


def test_a_pickle_is_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pickle would make a file; beside safetensors it is passed over, alone it is refused."""
    monkeypatch.chdir(tmp_path)
    pickle = b"cbuiltins\nopen\n(S'pwned'\nS'w'\ntR."  # open('pwned', 'w')
    alone = directory(tmp_path / "alone", {"pytorch_model.bin": pickle})
    with pytest.raises(StartupError, match="safetensors"):
        open_weights(found(alone), "auto", 0)
    beside = directory(tmp_path / "beside", {"pytorch_model.bin": pickle, "model.safetensors": {"a": A}})
    assert torch.equal(open_weights(found(beside), "auto", 0).get("a"), A)
    assert not (tmp_path / "pwned").exists()


def test_formats_that_are_asked_for(tmp_path: Path) -> None:
    path = directory(tmp_path / "m", {"model.safetensors": {"a": A}})
    gguf = write_model(tmp_path / "m.gguf", "llama", small_weights(), NUMBERS, scored_tokenizer())
    assert open_weights(found(path), "safetensors", 0).names() == {"a"}
    with pytest.raises(StartupError, match="--load-format is gguf, and m is safetensors"):
        open_weights(found(path), "gguf", 0)
    converted = locate(str(gguf), None, None, lambda stage, fraction: None, Cache(tmp_path / "cache"))
    weights = open_weights(converted, "gguf", 0)
    np.testing.assert_array_equal(weights.get("model.norm.weight").numpy(), small_weights()["output_norm.weight"])


def test_random_weights_depend_on_seed_and_name_alone(tmp_path: Path) -> None:
    checkpoint = found(directory(tmp_path / "m", {}))
    first, again, other = (open_weights(checkpoint, "dummy", seed) for seed in (1, 1, 2))
    again.get("something else", (5, 5))
    x = first.get("model.layers.0.mlp.up_proj.weight", (64, 128))
    assert x.dtype == torch.bfloat16 and x.shape == (64, 128) and first.names() == frozenset()
    assert torch.equal(x, again.get("model.layers.0.mlp.up_proj.weight", (64, 128)))
    assert not torch.equal(x, other.get("model.layers.0.mlp.up_proj.weight", (64, 128)))
    assert not torch.equal(x, first.get("model.layers.1.mlp.up_proj.weight", (64, 128)))
    assert x.float().std().item() == pytest.approx(0.02, rel=0.05)
    assert torch.equal(first.get("model.norm.weight", (3,)), torch.ones(3, dtype=torch.bfloat16))
    assert torch.equal(first.get("q_proj.bias", (3,)), torch.zeros(3, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="need a shape"):
        DummyWeights(torch.float32, 0).get("x")


def test_rounding_to_bfloat16_is_torchs() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    ties = (np.arange(1 << 16, dtype=np.uint32) << 16) + 0x8000
    values = np.concatenate([bits, ties]).view(np.float32)
    values = values[np.isfinite(values)]
    expected = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.uint16).numpy()
    np.testing.assert_array_equal(to_bfloat16(values), expected)


def test_the_default_model_is_its_file_dequantised() -> None:
    from gguf.quants import dequantize

    from radixlm.checkpoint.gguf import open_gguf
    from radixlm.checkpoint.packaged import PACKAGED, gguf_file

    checkpoint = packaged()
    weights = open_weights(checkpoint, "auto", 0)
    source = gguf_file(PACKAGED["smollm2"], Cache(checkpoint.directory.parent), lambda stage, fraction: None)
    tensors = open_gguf(source).tensors
    assert len(weights.names()) == len(tensors) == 272
    for name, theirs, heads in (
        ("model.layers.7.mlp.down_proj.weight", "blk.7.ffn_down.weight", 0),
        ("model.layers.29.self_attn.v_proj.weight", "blk.29.attn_v.weight", 0),
        ("model.layers.3.self_attn.q_proj.weight", "blk.3.attn_q.weight", 9),
        ("model.layers.3.self_attn.k_proj.weight", "blk.3.attn_k.weight", 3),
    ):
        info = tensors[theirs]
        expected = torch.from_numpy(dequantize(info.raw, GGMLQuantizationType[info.kind]))
        if heads:  # rows of a head take turns between its two rotary halves
            rows, columns = expected.shape
            expected = expected.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
        assert torch.equal(weights.get(name, tuple(expected.shape)), expected.to(torch.bfloat16)), name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "qwen2.5-coder-0.5b", "gemma3-270m"])
def test_packaged_models_are_what_transformers_reads_from_their_files(name: str) -> None:
    """Every weight, bit for bit. Downloads half a gigabyte for the second."""
    from transformers import AutoModelForCausalLM

    from radixlm.checkpoint.packaged import PACKAGED, gguf_file

    checkpoint = packaged(name)
    source = gguf_file(PACKAGED[name], Cache(checkpoint.directory.parent), lambda stage, fraction: None)
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.bfloat16)
    weights = open_weights(checkpoint, "gguf", 0)
    reference = model.state_dict()
    if checkpoint.config["tie_word_embeddings"]:
        reference.pop("lm_head.weight")
    assert weights.names() == set(reference)
    for tensor, values in reference.items():
        assert torch.equal(weights.get(tensor, tuple(values.shape)), values), tensor
