"""The runner on an NVIDIA GPU: the sampler chooses what it chooses on a CPU, and a model speaks as in transformers."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from radixlm.base.request import LogprobParams
from radixlm.base.sampling import SamplingParams
from radixlm.config.schema import CacheConfig, Config, DeviceConfig, ModelConfig, ScheduleConfig
from radixlm.device.base import Device
from radixlm.device.select import choose, open_device
from radixlm.runner.boot import boot
from radixlm.sampling.logprobs import Scorer
from radixlm.sampling.sampler import NOT_FINITE, OK
from support.crowd import Crowd, Job
from support.sampling import WISHES, Bench

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(scope="module")
def gpu() -> Device:
    return open_device(choose("cuda"))


def test_facts(gpu: Device) -> None:
    facts = gpu.facts()
    assert facts.kind == "cuda" and facts.name
    assert facts.features[0].startswith("sm_")
    assert 0 < facts.memory_free <= facts.memory_total
    assert gpu.free_memory() >= facts.memory_free
    assert gpu.default_dtype(torch.bfloat16)[0] in (torch.bfloat16, torch.float16)


def test_copies_arrive(gpu: Device) -> None:
    numbers = np.arange(1000)
    numbers.setflags(write=False)
    there = gpu.upload(numbers)
    back, doubled = gpu.download([there, there * 2]).wait()
    assert there.device.type == "cuda"
    assert back.tolist() == numbers.tolist() and doubled.tolist() == (numbers * 2).tolist()


@pytest.mark.parametrize("vocab", [1000, 49152])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_those_of_a_cpu_in_any_batch(gpu: Device, vocab: int, dtype: torch.dtype) -> None:
    shuffled = np.random.default_rng(3)
    rows = [
        (WISHES[i % len(WISHES)], shuffled.integers(0, vocab, 5 + i).tolist(), shuffled.integers(0, vocab, i).tolist())
        for i in range(30)
    ]
    logits = (torch.randn(30, vocab, generator=torch.Generator().manual_seed(3)) * 3).to(dtype)
    expected = Bench(rows, vocab).sample(logits).tokens.tolist()
    bench = Bench(rows, vocab, gpu)
    logits = logits.cuda()
    together = bench.sample(logits).tokens.tolist()
    # One draw in a million may fall on the other side of an edge, as exp() is rounded differently.
    assert sum(a != b for a, b in zip(together, expected, strict=True)) <= 1
    for size in (1, 7, 30):
        order = shuffled.permutation(30)[:size]
        assert bench.sample(logits[order], order.tolist()).tokens.tolist() == [together[i] for i in order]


def test_scores_that_are_not_finite_fail_their_row_alone(gpu: Device) -> None:
    logits = torch.randn(len(WISHES), 500, generator=torch.Generator().manual_seed(4)).cuda()
    bench = Bench([(params, [1], [2]) for params in WISHES], 500, gpu)
    healthy = bench.sample(logits).tokens.tolist()
    logits[4, 77] = torch.nan
    sampled = bench.sample(logits)
    assert sampled.status.tolist() == [NOT_FINITE if i == 4 else OK for i in range(len(WISHES))]
    assert sampled.tokens.tolist() == [0 if i == 4 else token for i, token in enumerate(healthy)]


def test_log_probabilities_are_ranked_as_on_a_cpu(gpu: Device) -> None:
    logits = (torch.randn(5, 3000, generator=torch.Generator().manual_seed(5)) * 4).round()  # many ties
    tokens, asked = torch.arange(5), LogprobParams(top=9, token_ids=(3, 4))
    scored = Scorer(3000, gpu).score(lambda a, b: logits.cuda()[a:b], tokens.cuda(), [asked])
    values = scored.top.cpu()
    order = logits.sort(stable=True, dim=-1, descending=True).indices[:, :9]
    assert torch.equal(scored.top_ids.cpu(), order)
    torch.testing.assert_close(values, logits.log_softmax(-1).gather(1, order))


@pytest.mark.parametrize(("page_size", "depth"), [(1, 2), (16, 1), (16, 3)])
def test_greedy_text_equals_that_of_transformers(tmp_path: Path, page_size: int, depth: int) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=199, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, eos_token_id=7, initializer_range=0.3,
    )  # fmt: skip
    reference = LlamaForCausalLM(config).eval()
    reference.save_pretrained(tmp_path)
    reference.cuda()
    booted = boot(
        Config(
            model=ModelConfig(model=str(tmp_path), dtype="float32"),
            device=DeviceConfig(device="cuda"),
            cache=CacheConfig(page_size=page_size, max_total_tokens=4096),
            schedule=ScheduleConfig(max_running_requests=8),
        ),
        lambda stage, fraction: None,
    )
    rng = random.Random(page_size)
    greedy = SamplingParams(temperature=0.0, max_new_tokens=10)
    jobs = [Job(uid, [rng.randrange(199) for _ in range(rng.randrange(1, 60))], greedy) for uid in range(12)]
    pool = booted.facts.pool
    crowd = Crowd(booted.runner, rows=8, pages=pool.pages, page_size=page_size, chunk=9, depth=depth, seed=depth)
    for job in crowd.run(jobs):
        tokens = list(job.prompt)
        with torch.inference_mode():
            for _ in range(10):
                tokens.append(int(reference(torch.tensor([tokens], device="cuda")).logits[0, -1].argmax()))
        assert job.output == tokens[len(job.prompt) :]


def test_captured_steps_see_what_steps_launched_one_by_one_see(tmp_path: Path) -> None:
    """In bfloat16, where prompts and decode rows go through the backend that GPUs choose by themselves. Few layers and
    clear scores: rounding decides nothing here, a context that is not read decides everything.
    """
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=199, hidden_size=256, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, eos_token_id=7, initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    rng = random.Random(1)
    greedy = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)
    prompts = [[rng.randrange(199) for _ in range(rng.choice((3, 70, 600, 900)))] for _ in range(12)]
    said = []
    for disabled in (False, True):
        booted = boot(
            Config(
                model=ModelConfig(model=str(tmp_path), dtype="bfloat16"),
                device=DeviceConfig(device="cuda", disable_cuda_graph=disabled),
                cache=CacheConfig(page_size=1, max_total_tokens=16384),
                schedule=ScheduleConfig(max_running_requests=16),
            ),
            lambda stage, fraction: None,
        )
        crowd = Crowd(booted.runner, rows=12, pages=booted.facts.pool.pages, page_size=1, chunk=2048, depth=1, seed=0)
        jobs = crowd.run([Job(uid, prompt, greedy) for uid, prompt in enumerate(prompts)])
        said.append({job.uid: job.output for job in jobs})
    same = sum(a == b for uid in said[0] for a, b in zip(said[0][uid], said[1][uid], strict=True))
    assert same > 0.9 * 12 * 12
