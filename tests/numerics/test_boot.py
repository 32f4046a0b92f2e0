"""A whole start on a CPU with a small Llama of random weights, against transformers and in every shape of step."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from radixlm.base.errors import StartupError
from radixlm.base.sampling import SamplingParams
from radixlm.config.schema import CacheConfig, Config, DeviceConfig, ModelConfig, ScheduleConfig
from radixlm.runner.boot import Booted, boot
from radixlm.sampling.sampler import NOT_FINITE, REASONS
from support.crowd import Crowd, Job

VOCAB, CONTEXT, POISON = 199, 256, 198
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=10, logit_bias=((POISON, -100.0),))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The model is so small that a second thread only waits. Starting an engine sets the number too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def reference() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, eos_token_id=7, bos_token_id=1, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def directory(reference: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    reference.save_pretrained(path)
    return path


def start(directory: Path, **changes: Any) -> Booted:
    config = Config(
        model=ModelConfig(model=str(directory), **{"dtype": "float32", **changes.pop("model", {})}),
        device=DeviceConfig(**{"device": "cpu", "threads": 1, **changes.pop("device", {})}),
        cache=CacheConfig(**{"max_total_tokens": 4096, **changes.pop("cache", {})}),
        schedule=ScheduleConfig(**{"max_running_requests": 8, **changes.pop("schedule", {})}),
    )
    return boot(config, changes.pop("report", lambda stage, fraction: None))


def run(booted: Booted, jobs: list[Job], **more: Any) -> list[Job]:
    pool = booted.facts.pool
    settings = {"chunk": 11, "depth": 2, "seed": 1} | more
    return Crowd(booted.runner, rows=pool.max_running, pages=pool.pages, page_size=pool.page_size, **settings).run(jobs)


def make_jobs(seed: int, count: int = 12, sampling: SamplingParams = GREEDY) -> list[Job]:
    rng = random.Random(seed)
    stem = [rng.randrange(POISON) for _ in range(50)]
    return [
        Job(
            uid,
            stem[: rng.choice([0, 16, 50])] + [rng.randrange(POISON) for _ in range(rng.randrange(1, 30))],
            sampling,
        )
        for uid in range(count)
    ]


def expected(reference: LlamaForCausalLM, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            logits = reference(torch.tensor([tokens])).logits[0, -1]
            logits[POISON] = -torch.inf
            tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("backend", ["cpu", "torch_ref"])
@pytest.mark.parametrize(("page_size", "chunk", "depth"), [(1, 11, 1), (16, 1, 2), (64, 300, 2)])
def test_greedy_text_equals_that_of_transformers(
    reference: LlamaForCausalLM, directory: Path, backend: str, page_size: int, chunk: int, depth: int
) -> None:
    booted = start(directory, cache={"page_size": page_size}, device={"attention_backend": backend})
    for job in run(booted, make_jobs(page_size), chunk=chunk, depth=depth, seed=chunk):
        assert job.output == expected(reference, job.prompt, 10)


@pytest.mark.parametrize("backend", ["cpu", "torch_ref"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_numbers_that_are_none_stay_with_their_request(
    reference: LlamaForCausalLM, tmp_path: Path, backend: str, page_size: int
) -> None:
    """Also in the pages that the broken request leaves behind."""
    broken = LlamaForCausalLM(reference.config).eval()
    broken.load_state_dict(reference.state_dict())
    with torch.no_grad():
        broken.model.embed_tokens.weight[POISON] = torch.nan
    broken.save_pretrained(tmp_path)
    booted = start(
        tmp_path, device={"attention_backend": backend}, cache={"page_size": page_size, "max_total_tokens": 1024}
    )
    for round_ in range(3):
        healthy = make_jobs(round_, 8)
        poisoned = [Job(100 + i, [5, POISON, *range(10 * i + 1)], GREEDY) for i in range(3)]
        run(booted, [*healthy, *poisoned], seed=round_)
        assert [job.failed for job in poisoned] == [REASONS[NOT_FINITE]] * 3
        for job in healthy:
            assert job.failed is None
            assert job.output == expected(reference, job.prompt, 10)


def test_facts_and_decisions(directory: Path) -> None:
    stages: list[str] = []
    booted = start(directory, report=lambda stage, fraction: stages.append(stage))
    model, pool = booted.facts.model, booted.facts.pool
    assert (model.architecture, model.dtype, model.layers, model.hidden_size) == ("LlamaForCausalLM", "float32", 2, 64)
    assert (model.vocab_size, model.sampled_vocab_size, model.eos_ids, model.bos_id) == (VOCAB, VOCAB, (7,), 1)
    assert (model.context_length, model.kv_bytes_per_token) == (CONTEXT, 2 * 2 * 2 * 16 * 4)
    assert (pool.pages, pool.page_size, pool.max_running) == (4096, 1, 8)
    assert pool.bytes == 4096 * model.kv_bytes_per_token
    decisions = booted.facts.decisions
    assert {
        "device",
        "threads",
        "dtype",
        "kv_cache_dtype",
        "kv_pool",
        "page_size",
        "decode_attention",
    } <= decisions.keys()
    assert decisions["dtype"] == ("float32", "asked for")
    assert all(value and reason for value, reason in decisions.values())
    assert list(booted.facts.timings) == ["torch", "device", "model files", "weights", "memory", "warm-up"]
    assert [stage for stage, last in zip(stages, ["", *stages], strict=False) if stage != last] == list(
        booted.facts.timings
    )
    assert booted.config.cache.page_size == 1
    assert booted.runner.facts is booted.facts


def test_a_padded_output_is_cut_to_the_tokenizer(reference: LlamaForCausalLM, directory: Path, tmp_path: Path) -> None:
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tokenizer = {"model": {"type": "BPE", "vocab": {f"t{i}": i for i in range(120)}, "merges": []}, "added_tokens": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    booted = start(tmp_path)
    assert booted.facts.model.sampled_vocab_size == 120
    hot = SamplingParams(temperature=3.0, max_new_tokens=30, seed=3)
    assert max(token for job in run(booted, make_jobs(4, sampling=hot)) for token in job.output) < 120


def test_random_weights_are_a_function_of_the_seed(directory: Path) -> None:
    def text(seed: int) -> list[list[int]]:
        booted = start(directory, model={"load_format": "dummy", "random_seed": seed})
        return [job.output for job in run(booted, make_jobs(5, 3))]

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_deterministic_means_float32_on_a_cpu(directory: Path) -> None:
    booted = start(directory, device={"deterministic": True}, model={"dtype": "auto"})
    assert booted.facts.model.dtype == "float32"
    with pytest.raises(StartupError, match="--deterministic computes in float32 on a CPU, and --dtype is bfloat16"):
        start(directory, device={"deterministic": True}, model={"dtype": "bfloat16"})


def test_a_cache_of_8_bits_needs_a_gpu(directory: Path) -> None:
    with pytest.raises(StartupError, match=r"--kv-cache-dtype fp8_e4m3 needs a GPU"):
        start(directory, cache={"kv_cache_dtype": "fp8_e4m3"})


def test_what_cannot_start_says_why(directory: Path) -> None:
    with pytest.raises(StartupError, match=r"--context-length is 257; .* was made for 1 to 256 positions"):
        start(directory, model={"context_length": 257})
    with pytest.raises(
        StartupError, match=r"KV pool of .* holds 100 tokens, less than --context-length 200: use <= 100"
    ):
        start(directory, model={"context_length": 200}, cache={"max_total_tokens": 100})
    with pytest.raises(StartupError, match="unknown attention backend 'nonsense'; known: "):
        start(directory, device={"attention_backend": "nonsense"})


def test_the_kv_cache_may_have_another_dtype(directory: Path) -> None:
    booted = start(directory, cache={"kv_cache_dtype": "bfloat16"})
    assert booted.facts.model.kv_bytes_per_token == 2 * 2 * 2 * 16 * 2
    assert all(len(job.output) == 10 for job in run(booted, make_jobs(6)))
