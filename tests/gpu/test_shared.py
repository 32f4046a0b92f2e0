"""Engines on a GPU in float32: greedy tokens do not depend on whether shared prefixes are read together."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from radixlm.base.plan import Plan
from radixlm.base.request import Request
from radixlm.base.sampling import SamplingParams
from radixlm.config.resolve import override
from radixlm.config.schema import Config
from radixlm.engine.build import make_loop
from radixlm.runner.boot import Booted, boot
from radixlm.wire.link import Callback, LocalLink
from radixlm.wire.messages import Drain, Failed, Submit, Tokens
from support import tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

VOCAB = 2000


class Watched:
    """A runner, and how many of its steps were told of shared prefixes."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.shared = 0
        self.largest = 0  # rows of the largest batch with shared prefixes

    def forward(self, plan: Plan) -> Any:
        if plan.shared:
            self.shared += 1
            self.largest = max(self.largest, len(plan.rows))
        return self._runner.forward(plan)

    def sample(self, pending: Any, masks: Any = None) -> None:
        self._runner.sample(pending, masks)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = tiny.config(
        vocab_size=VOCAB, hidden_size=128, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("shared") / "model"
    return tiny.write(path, shape, tiny.random_weights(shape), tokenizer=lambda directory: None)


def texts() -> list[tuple[list[int], int]]:
    """Prompts and how many tokens follow: a crowd behind one prefix, a nested one, a pair, strangers. They end at
    different times, so groups shrink.
    """
    rng = random.Random(2)

    def ids(count: int) -> list[int]:
        return rng.choices(range(3, VOCAB), k=count)

    crowd, stem, pair = ids(603), ids(500), ids(1100)
    nested = stem + ids(400)
    prompts = [
        *(crowd + ids(rng.randint(1, 40)) for _ in range(21)),
        *(stem + ids(rng.randint(1, 40)) for _ in range(4)),
        *(nested + ids(rng.randint(1, 40)) for _ in range(7)),
        *(pair + ids(3) for _ in range(2)),
        *(ids(rng.randint(1, 700)) for _ in range(5)),
    ]
    rng.shuffle(prompts)
    return [(prompt, rng.randint(12, 40)) for prompt in prompts]


def answers(booted: Booted, share: bool, depth: int) -> tuple[list[list[int]], Watched]:
    """Greedy answers to `texts`, all submitted at once."""
    inbox: LocalLink[Any] = LocalLink()
    said: dict[int, list[int]] = {}

    def hear(message: Any) -> None:
        assert not isinstance(message, Failed), message
        if isinstance(message, Tokens):
            uids, ids = np.frombuffer(message.uids, np.int64), np.frombuffer(message.ids, np.int32)
            for uid, token in zip(uids.tolist(), ids.tolist(), strict=True):
                said[uid].append(token)

    for uid, (prompt, new) in enumerate(texts()):
        said[uid] = []
        sampling = SamplingParams(max_new_tokens=new, temperature=0.0, ignore_eos=True)
        inbox.send(Submit(Request(uid=uid, rid=str(uid), tokens=tuple(prompt), sampling=sampling)))
    inbox.send(Drain(600.0))
    sink: Callback[Any] = Callback(hear)
    facts = msgspec.structs.replace(booted.facts, shared_prefix=share)
    watched = Watched(booted.runner)
    make_loop(booted.config, facts, watched, inbox, sink, sink, depth).run()
    assert [len(tokens) for tokens in said.values()] == [new for _, new in texts()]
    return list(said.values()), watched


@pytest.mark.parametrize(("page_size", "graphs", "depth"), [(1, True, 2), (16, True, 1), (16, False, 2)])
def test_greedy_tokens_do_not_depend_on_sharing(model: Path, page_size: int, graphs: bool, depth: int) -> None:
    options = {
        "model": str(model),
        "dtype": "float32",
        "device": "cuda",
        "page_size": page_size,
        "max_total_tokens": 65_536,
        "max_running_requests": 48,
        "disable_cuda_graph": not graphs,
    }
    booted = boot(override(Config(), options), lambda stage, fraction: None)
    assert booted.facts.shared_prefix
    alone, never = answers(booted, share=False, depth=depth)
    together, watched = answers(booted, share=True, depth=depth)
    assert never.shared == 0 and watched.shared > 10 and watched.largest > 32
    assert together == alone
