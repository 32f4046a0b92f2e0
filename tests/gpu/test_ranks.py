"""Ranks on GPUs of their own: NCCL inside captured steps, the same tokens as one GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from radixlm import Engine
from radixlm.base.errors import StartupError
from support.tiny import config, write

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

OPTIONS: dict[str, Any] = {"load_format": "dummy", "random_seed": 1, "max_total_tokens": 20_000, "device": "cuda"}
PROMPTS = [[11 + 7 * i for i in range(40)], [5, 6, 7], [3, 4] * 100, [9]]
GREEDY = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
DRAWN = {"temperature": 1.0, "seed": 7, "top_p": 0.9, "max_new_tokens": 40, "ignore_eos": True, "presence_penalty": 1}


def answers(model: Path, **options: Any) -> list[list[int]]:
    with Engine(model=str(model), **OPTIONS, **options) as engine:
        found = [engine.generate(input_ids=PROMPTS, sampling_params=params) for params in (GREEDY, DRAWN, GREEDY)]
    return [answer["output_ids"] for some in found for answer in some]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_two_gpus_say_what_one_says(tied: bool, graphs: bool, tmp_path: Path) -> None:
    model = write(tmp_path / "model", config(tie_word_embeddings=tied), None)
    options = {"dtype": "float32", "disable_cuda_graph": not graphs}
    assert answers(model, **options, tp=2) == answers(model, **options)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_bfloat16_runs_through_the_kernels(tmp_path: Path) -> None:
    """Rounding decides between near ties here: the ranks must agree with each other, not with one GPU."""
    model = write(tmp_path / "model", config(), None)
    found = answers(model, tp=2)
    assert all(len(tokens) == 40 for tokens in found)
    assert found[:4] == found[8:]


def test_more_ranks_than_gpus_are_refused(tmp_path: Path) -> None:
    model = write(tmp_path / "model", config(), None)
    there = torch.cuda.device_count()
    with pytest.raises(StartupError, match=f"use {there} or less"):
        Engine(model=str(model), **OPTIONS, tp=there + 1)
