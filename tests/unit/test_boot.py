"""What a start decides without a model: the vocabulary, the context, and the whole start of the null device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from radixlm.base.errors import StartupError
from radixlm.base.sampling import SamplingParams
from radixlm.checkpoint.checkpoint import Checkpoint
from radixlm.checkpoint.locate import locate
from radixlm.config.schema import CacheConfig, Config, DeviceConfig, ModelConfig, ScheduleConfig
from radixlm.runner.boot import Booted, boot
from radixlm.runner.null import NullRunner
from radixlm.runner.vocabulary import read_vocabulary
from support.crowd import Crowd, Job

CONFIG = {"architectures": ["LlamaForCausalLM"], "vocab_size": 128, "max_position_embeddings": 512, "eos_token_id": 5}
TOKENIZER = {
    "version": "1.0",
    "model": {"type": "BPE", "vocab": {f"t{i}": i for i in range(100)}, "merges": []},
    "added_tokens": [{"id": 100, "content": "<s>", "special": True}, {"id": 103, "content": "</s>", "special": True}],
}


def directory(path: Path, **files: Any) -> Path:
    files = {"config": CONFIG, "tokenizer": TOKENIZER} | files
    for name, content in files.items():
        if content is not None:
            (path / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def checkpoint(path: Path) -> Checkpoint:
    return locate(str(path), None, None, lambda stage, fraction: None)


def start(path: Path, **changes: Any) -> Booted:
    config = Config(
        model=ModelConfig(model=str(path), **changes.pop("model", {})),
        device=DeviceConfig(device="null"),
        cache=CacheConfig(**changes.pop("cache", {})),
        schedule=ScheduleConfig(**changes.pop("schedule", {})),
    )
    return boot(config, lambda stage, fraction: None)


def test_every_source_of_eos_ids_counts_once(tmp_path: Path) -> None:
    path = directory(
        tmp_path,
        generation_config={"eos_token_id": [7, 5]},
        tokenizer_config={"eos_token": "</s>", "bos_token": {"content": "<s>"}},
    )
    found = read_vocabulary(checkpoint(path))
    assert (found.size, found.eos_ids, found.bos_id) == (104, (7, 5, 103), 100)


def test_a_vocabulary_with_scores_instead_of_ids(tmp_path: Path) -> None:
    tokenizer = {
        "model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["a", -1.5], ["</s>", 0.0]]},
        "added_tokens": [],
    }
    path = directory(tmp_path, tokenizer=tokenizer, tokenizer_config={"eos_token": "</s>"})
    assert read_vocabulary(checkpoint(path)).eos_ids == (5, 2)


def test_without_a_tokenizer_every_id_is_a_token(tmp_path: Path) -> None:
    found = read_vocabulary(checkpoint(directory(tmp_path, tokenizer=None)))
    assert (found.size, found.eos_ids, found.bos_id) == (None, (5,), None)


@pytest.mark.parametrize("content", ["{", '{"model": {"vocab": 3}}'])
def test_a_broken_tokenizer_is_named(tmp_path: Path, content: str) -> None:
    path = directory(tmp_path, tokenizer=content)
    with pytest.raises(StartupError, match=r"tokenizer\.json is not a tokenizer"):
        read_vocabulary(checkpoint(path))


def test_the_null_device_takes_the_shape_of_the_model(tmp_path: Path) -> None:
    booted = start(
        directory(tmp_path), cache={"max_total_tokens": 4000, "page_size": 16}, schedule={"max_running_requests": 8}
    )
    model, pool = booted.facts.model, booted.facts.pool
    assert (model.vocab_size, model.sampled_vocab_size, model.eos_ids) == (128, 104, (5,))
    assert (model.context_length, pool.pages, pool.page_size, pool.max_running) == (512, 250, 16, 8)
    assert booted.facts.decisions["device"] == ("null", "asked for")
    assert booted.config.schedule.chunked_prefill_size is not None
    assert isinstance(booted.runner, NullRunner)
    jobs = [Job(uid, [uid, 9], SamplingParams(max_new_tokens=5)) for uid in range(12)]
    Crowd(booted.runner, rows=8, pages=250, page_size=16, chunk=4, depth=2, seed=0).run(jobs)
    assert all(len(job.output) == 5 and max(job.output) < 104 for job in jobs)


def test_a_small_pool_bounds_the_context_of_the_null_device(tmp_path: Path) -> None:
    assert start(directory(tmp_path), cache={"max_total_tokens": 100}).facts.model.context_length == 100


@pytest.mark.parametrize("asked", [0, 513])
def test_a_context_beyond_the_model_is_refused(tmp_path: Path, asked: int) -> None:
    with pytest.raises(StartupError, match=f"--context-length is {asked}; .* was made for 1 to 512 positions"):
        start(directory(tmp_path), model={"context_length": asked})


def test_the_null_device_starts_without_torch(tmp_path: Path) -> None:
    code = f"""
import sys
from radixlm.config.schema import Config, DeviceConfig, ModelConfig
from radixlm.runner.boot import boot
config = Config(model=ModelConfig(model={str(directory(tmp_path))!r}), device=DeviceConfig(device="null"))
boot(config, lambda stage, fraction: None)
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
