"""Greedy text of the default model in float32 is that of transformers, and stays the same however it is computed.

One reference serves all tests of this file: run them in one worker (`--dist loadgroup`).
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from radixlm import Engine
from radixlm.checkpoint.checkpoint import Checkpoint
from radixlm.checkpoint.locate import locate

pytestmark = [pytest.mark.xdist_group("equality"), pytest.mark.timeout(1200)]

NEW = 64
QUESTIONS = (
    "The capital of France is",
    "Write a Python function that adds two numbers.",
    "List three colors of the rainbow.",
    "Explain in one sentence why the sky is blue.",
    "Translate to Spanish: Good morning, my friend.",
    "1, 2, 3, 4,",
    "Once upon a time in a small village",
    "The three laws of thermodynamics are",
    "def fibonacci(n):",
    "SELECT name FROM",
    "What is the difference between a list and a tuple?",
    "Dear Sir or Madam,",
    "Water boils at",
    "To be, or not to be",
    "The mitochondria is",
    "import numpy as np",
    "Q: Who wrote Hamlet? A:",
    "A haiku about autumn:",
    "In 1969,",
    "Grüße aus Wien!",
)
#: One thread: two would wait for each other at every product while another test has one of the cores.
OPTIONS: dict[str, Any] = {"model": "smollm2", "dtype": "float32", "max_total_tokens": 20_000, "threads": 1}
GREEDY = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return locate("smollm2", None, None, lambda stage, fraction: None)


@pytest.fixture(scope="module")
def prompts(checkpoint: Checkpoint) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(checkpoint.tokenizer_file))
    return [tokenizer.encode(question).ids for question in QUESTIONS]


@pytest.fixture(scope="module")
def reference(checkpoint: Checkpoint, prompts: list[list[int]]) -> list[list[int]]:
    """The greedy answers, one prompt at a time, each token checked against transformers (float32, same weights).

    A text is the greedy one exactly if every token of it is the most probable after those before it. So one forward
    pass of transformers over prompt and answer checks all of them, at a tenth of the time that generating takes there.
    """
    import torch
    import transformers

    with Engine(**OPTIONS) as engine:
        answers = [engine.generate(input_ids=prompt, sampling_params=GREEDY)["output_ids"] for prompt in prompts]
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint.directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        for prompt, answer in zip(prompts, answers, strict=True):
            assert len(answer) == NEW
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            assert logits.argmax(-1).tolist() == answer
    return answers


def ids(answers: Any) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


def differences(got: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> list[str]:
    """One line for each answer that is not what it should be."""
    lines = []
    for question, a, b in zip(QUESTIONS, got, expected, strict=True):
        if list(a) != list(b):
            same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            lines.append(f"{question!r} differs at token {same}")
    return lines


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine(**{**OPTIONS, **getattr(request, "param", {})}) as made:
        yield made


def test_equal_to_transformers_alone_and_in_a_batch_cold_and_warm(
    engine: Engine, prompts: list[list[int]], reference: list[list[int]]
) -> None:
    cold = engine.generate(input_ids=prompts, sampling_params=GREEDY)
    assert not differences(ids(cold), reference)
    warm = engine.generate(input_ids=prompts, sampling_params=GREEDY)
    assert not differences(ids(warm), reference)
    # The whole prompt but its last token was cached.
    assert [a["meta_info"]["cached_tokens"] for a in warm] == [len(p) - 1 for p in prompts]
    alone = [engine.generate(input_ids=prompt, sampling_params=GREEDY)["output_ids"] for prompt in prompts[:4]]
    assert alone == reference[:4]
    engine.flush_cache()
    assert engine.generate(input_ids=prompts[0], sampling_params=GREEDY)["meta_info"]["cached_tokens"] == 0
    assert engine.audit()["leased"] == 0


@pytest.mark.parametrize(
    "engine",
    [
        {"page_size": 16},
        {"page_size": 64, "chunked_prefill_size": 16, "max_prefill_tokens": 256},
        {"chunked_prefill_size": 16},
        {"chunked_prefill_size": 4096},
        {"disable_radix_cache": True},
        {"attention_backend": "torch_ref"},
        {"threads": 2},
    ],
    indirect=True,
    ids=str,
)
def test_equal_however_it_is_computed(engine: Engine, prompts: list[list[int]], reference: list[list[int]]) -> None:
    assert not differences(ids(engine.generate(input_ids=prompts, sampling_params=GREEDY)), reference)
    again = engine.generate(input_ids=prompts, sampling_params=GREEDY)
    assert not differences(ids(again), reference)


@pytest.mark.parametrize("engine", [{"max_running_requests": 16}], indirect=True)
def test_equal_when_joining_and_leaving_at_random(
    engine: Engine, prompts: list[list[int]], reference: list[list[int]]
) -> None:
    """Requests of different lengths come at random times; some others are dropped in the middle."""
    rng = random.Random(1)
    order = [rng.randrange(len(prompts)) for _ in range(48)]
    lengths = [rng.randrange(1, NEW + 1) for _ in order]
    failures: list[str] = []

    def ask(index: int, length: int, drop: bool) -> None:
        stream = engine.generate(
            input_ids=prompts[index], sampling_params={**GREEDY, "max_new_tokens": length}, stream=True
        )
        got: list[int] = []
        for answer in stream:
            got = answer["output_ids"]
            if drop and len(got) > length // 2:
                stream.close()
                break
        if got != reference[index][: len(got)] or (not drop and len(got) != length):
            failures.append(f"prompt {index}: {len(got)} of {length} tokens, or wrong ones")

    threads = []
    for i, (index, length) in enumerate(zip(order, lengths, strict=True)):
        threads.append(threading.Thread(target=ask, args=(index, length, i % 4 == 3)))
        threads[-1].start()
        threading.Event().wait(rng.random() * 0.05)
    for thread in threads:
        thread.join()
    assert not failures
    assert engine.audit()["leased"] == 0
    assert engine.stats()["running"] == 0


@pytest.mark.parametrize(
    "engine",
    [{"max_total_tokens": 400, "max_running_requests": 20, "schedule_conservativeness": 0.05}],
    indirect=True,
)
def test_equal_after_pause_and_resume(engine: Engine, prompts: list[list[int]], reference: list[list[int]]) -> None:
    """The pool holds about five of the twenty: the others are paused and resumed on the way."""
    answers = engine.generate(input_ids=prompts, sampling_params=GREEDY)
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0
    assert not differences(ids(answers), reference)


def test_equal_with_two_steps_in_flight(prompts: list[list[int]], reference: list[list[int]]) -> None:
    from support.direct import run_requests

    assert not differences(run_requests(OPTIONS, prompts, GREEDY["max_new_tokens"], depth=2), reference)
