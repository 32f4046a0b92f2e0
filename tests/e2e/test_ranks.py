"""Several processes that compute one model: the same tokens as one process, and one life."""

from __future__ import annotations

import contextlib
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from radixlm import Engine
from radixlm.base.errors import StartupError, Unavailable
from radixlm.base.plan import Plan
from radixlm.base.sampling import SamplingParams
from radixlm.config.resolve import override
from radixlm.config.schema import Config
from radixlm.launch.ranks import started
from support.crowd import Crowd, Job
from support.live import Refused, Server, until
from support.tiny import config, random_model, write

pytestmark = pytest.mark.xdist_group("ranks")

#: Models of random weights: what their config has besides `tiny.config`.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, tied, one kv head": {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 49153},
    "qwen2 mixture": {
        "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window": 24,
        "sliding_window_pattern": 2, "tie_word_embeddings": True,
    },
}  # fmt: skip
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "load_format": "dummy", "random_seed": 1, "threads": 2, "max_total_tokens": 2000,
    "max_running_requests": 5, "chunked_prefill_size": 16,
}  # fmt: skip
GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
DRAWN = {"temperature": 1.0, "seed": 7, "top_p": 0.9, "max_new_tokens": 20, "ignore_eos": True, "presence_penalty": 1}

GRAMMAR = "(yes|no), [a-z]{3}, always the same end"

STEM = [11 + 7 * i for i in range(40)]
PROMPTS = [STEM, STEM[:25], [*STEM, 5, 6], [9], [3, 4] * 30, STEM[10:40], [21, 22, 23]]


def own_ranks() -> list[psutil.Process]:
    """The ranks of engines in this process, which may have servers of other tests beside them."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if re.search(r"launch\.child rank |radixlm: rank ", " ".join(child.cmdline())):
                found.append(child)
    return found


def everything(engine: Engine) -> dict[str, Any]:
    """Answers to requests of all kinds: chunks, mixed steps, cached prefixes, drawn tokens, grammars, scores."""

    def ids(prompts: Any, params: Any) -> list[list[int]]:
        return [answer["output_ids"] for answer in engine.generate(input_ids=prompts, sampling_params=params)]

    found: dict[str, Any] = {"cold": ids(PROMPTS, GREEDY), "drawn": ids(PROMPTS, DRAWN)}
    warm = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)
    found["warm"] = [answer["output_ids"] for answer in warm]
    found["cached"] = [answer["meta_info"]["cached_tokens"] for answer in warm]
    steered = engine.generate(input_ids=PROMPTS, sampling_params={**DRAWN, "ignore_eos": False, "regex": GRAMMAR})
    found["steered"] = [answer["text"] for answer in steered]
    assert all(re.fullmatch(GRAMMAR, text) for text in found["steered"])
    scored = engine.generate(input_ids=STEM, sampling_params=GREEDY, return_logprob=True, logprob_start_len=0)
    found["scores"] = [pair[0] for pair in scored["meta_info"]["input_token_logprobs"][1:]]
    engine.audit()
    return found


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_say_what_one_says(name: str, tmp_path: Path) -> None:
    model = str(write(tmp_path / "model", config(**MODELS[name]), None))
    with Engine(model=model, **OPTIONS) as engine:
        alone, facts = everything(engine), engine.facts
    with Engine(model=model, **OPTIONS, tensor_parallel_size=2) as engine:
        both = everything(engine)
        assert engine.facts.model.parameters == facts.model.parameters
        assert engine.facts.model.weight_bytes < 0.6 * facts.model.weight_bytes, "a rank holds its part alone"
        assert engine.facts.pool.pages == facts.pool.pages
        assert "gloo" in engine.facts.decisions["tensor_parallel_size"][1]
    assert both.pop("scores") == pytest.approx(alone.pop("scores"), abs=1e-4)
    assert both == alone
    assert both["warm"] == both["cold"] and max(both["cached"]) > 30
    assert not own_ranks()


def test_the_default_model_on_three_ranks() -> None:
    """It has 9 heads, 3 of keys and values: it cannot be halved, and says so."""
    options = {"model": "smollm2", "dtype": "float32", "max_total_tokens": 2000, "threads": 2}
    prompts = ["The capital of France is", "1, 2, 3, 4,"]
    params = {"temperature": 0, "max_new_tokens": 16}
    with Engine(**options) as engine:
        alone = [answer["text"] for answer in engine.generate(prompts, params)]
    with Engine(**options, tp=3) as engine:
        assert [answer["text"] for answer in engine.generate(prompts, params)] == alone
        assert engine.facts.model.kv_bytes_per_token == 30 * 2 * 64 * 4
    with pytest.raises(StartupError, match=r"is 2, .*: it has 9 attention heads, 3 key-value heads; use 1 or 3$"):
        Engine(**options, tp=2)
    assert not own_ranks()


def test_a_model_that_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    other = {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}
    model = str(write(tmp_path / "model", config(**other), None))
    with pytest.raises(StartupError, match="through transformers"):
        Engine(model=model, **OPTIONS, tp=2)
    with pytest.raises(StartupError, match="null device"):
        Engine(model=model, device="null", tp=2)
    assert not own_ranks()


class Masked:
    """A runner whose spans may only be continued by ids that leave a remainder, which depends on the span."""

    def __init__(self, runner: Any, vocab: int) -> None:
        self._runner = runner
        ids = np.arange(-(-vocab // 32) * 32)
        self._words = [np.packbits(ids % 3 == rest, bitorder="little").view(np.int32) for rest in range(3)]
        self._plan: Plan | None = None

    def forward(self, plan: Plan) -> Any:
        self._plan = plan
        return self._runner.forward(plan)

    def sample(self, pending: Any) -> None:
        assert self._plan is not None
        starts = self._plan.starts
        masks = {int(span): self._words[starts[span] % 3] for span in np.flatnonzero(self._plan.samples) if span % 2}
        self._runner.sample(pending, masks)


def test_wild_plans_two_in_flight_under_masks(tmp_path: Path) -> None:
    """Random valid plans, pauses and shared pages among them; some spans of each step under a mask."""
    model = str(write(tmp_path / "model", config(vocab_size=1000), None))
    outputs: list[list[list[int]]] = []
    for size in (1, 2):
        options = {**OPTIONS, "model": model, "tensor_parallel_size": size, "page_size": 4}
        with started(override(Config(), options), lambda stage, fraction: None, lambda reason: None) as booted:
            rng, pool = random.Random(5), booted.facts.pool
            jobs = [
                Job(
                    uid,
                    STEM[: rng.choice([0, 30])] + [rng.randrange(1000) for _ in range(rng.randrange(1, 30))],
                    SamplingParams(temperature=uid % 2, seed=uid, top_p=0.9, max_new_tokens=10),
                )
                for uid in range(16)
            ]
            crowd = Crowd(
                Masked(booted.runner, 1000), rows=pool.max_running, pages=pool.pages, page_size=pool.page_size,
                chunk=9, depth=2, seed=1,
            )  # fmt: skip
            outputs.append([job.output for job in crowd.run(jobs)])
    assert outputs[0] == outputs[1] and all(len(output) == 10 for output in outputs[0])


def test_a_rank_that_dies_while_it_starts_is_a_failed_start(model: Path) -> None:
    def kill_the_first() -> None:
        until(lambda: bool(own_ranks()), 20.0, "a rank")
        own_ranks()[0].kill()

    killer = threading.Thread(target=kill_the_first)
    killer.start()
    with pytest.raises(StartupError, match="rank 1 was ended by signal 9"):
        Engine(model=str(model), threads=1, tp=2)
    killer.join()
    assert not own_ranks()
    server = Server(model, "--tp", "2", wait=False)
    until(lambda: any("rank" in " ".join(process.cmdline()) for process in server.processes()), 20.0, "a rank")
    family = server.processes()
    process_of(server, "rank").kill()
    assert server.process.wait(20) == 2
    assert "rank 1 was ended by signal 9" in server.log() and "Traceback" not in server.log()
    server.check_gone(family, 1.0)
    server.close()


def test_a_dead_rank_ends_an_engine_and_nothing_else(tmp_path: Path) -> None:
    model = str(write(tmp_path / "model", config(), None))
    with Engine(model=model, **OPTIONS, tp=2) as engine:
        engine.generate(input_ids=[5], sampling_params=GREEDY)
        (rank,) = own_ranks()
        rank.kill()
        until(lambda: not own_ranks(), what="the end of the rank")
        time.sleep(0.2)  # of the news
        with pytest.raises(Unavailable, match="rank 1 was ended by signal 9"):
            engine.generate(input_ids=[5], sampling_params=GREEDY)
        started = time.monotonic()
    assert time.monotonic() - started < 5.0


# ---- a server


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def server(model: Path) -> Iterator[Server]:
    made = Server(model, "--tp", "2", "--dtype", "float32")
    yield made
    made.kill()


def process_of(server: Server, role: str) -> psutil.Process:
    (found,) = (process for process in server.processes() if role in " ".join(process.cmdline()))
    return found


def stream(server: Server, results: list[Any], tokens: int = 1900, prompt: str = "Say it:") -> threading.Thread:
    """Read a long stream in a thread; what ended it is appended to `results`."""

    def read() -> None:
        try:
            body = {"model": server.model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
            with server.open("/v1/completions", body) as events:
                count = len(list(events))
            results.append((count, events.done, events.error))
        except Refused as refused:
            results.append((0, False, refused.error))

    thread = threading.Thread(target=read)
    thread.start()
    return thread


def test_a_server_of_two_ranks_answers_drains_and_leaves_nothing(server: Server, model: Path) -> None:
    text = server.text(prompt="Hello", max_tokens=8, ignore_eos=True)
    with Engine(model=str(model), dtype="float32", threads=1, max_total_tokens=2000) as alone:
        params = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        assert text == alone.generate("Hello", params)["text"]
    listening = [
        connection.laddr.ip
        for process in server.processes()
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert set(listening) <= {"127.0.0.1"}, "the ranks are reached from this machine alone"
    results: list[Any] = []
    thread = stream(server, results, 100)
    until(lambda: server.figures()["running"] == 1)
    family = server.processes()
    assert len(family) == 4
    server.signal(signal.SIGTERM)
    thread.join(60)
    ((count, done, error),) = results
    assert count > 50 and done and error is None  # an event may carry the text of several tokens
    assert server.process.wait(20) == 0, server.log()
    server.check_gone(family, 1.0)
    assert "killing" not in server.log()


def test_an_idle_rank_costs_nothing(server: Server) -> None:
    server.text(prompt="Hello", max_tokens=4)
    time.sleep(1.0)

    def busy() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in server.processes())

    before = busy()
    time.sleep(5.0)
    assert busy() - before < 0.1


@pytest.mark.parametrize("busy", [False, True])
def test_a_rank_that_dies_ends_the_server_with_the_reason(server: Server, busy: bool) -> None:
    results: list[Any] = []
    threads = [stream(server, results)] if busy else []
    if busy:
        until(lambda: server.figures()["running"] == 1)
    family = server.processes()
    process_of(server, "rank 1").kill()
    until(lambda: server.health() == 503, 3.0, "the news")
    for thread in threads:
        thread.join(3.0)
        assert not thread.is_alive()
    assert all(not done and "rank 1 was ended by signal 9" in error["message"] for _, done, error in results)
    assert server.process.wait(15) == 1
    assert "rank 1 was ended by signal 9" in server.log() and "Traceback" not in server.log()
    server.check_gone(family, 1.0)


def test_a_rank_whose_step_fails_ends_the_server(server: Server) -> None:
    """It gets no more memory: the others, who wait for it in the middle of the step, must not wait for long."""
    server.text(prompt="Hello", max_tokens=4)
    family = server.processes()
    rank = process_of(server, "rank 1")
    size = rank.memory_info().vms
    rank.rlimit(psutil.RLIMIT_AS, (size, size))
    results: list[Any] = []
    thread = stream(server, results, 4, "many words " * 900)
    thread.join(20.0)
    assert not thread.is_alive()
    ((_, done, error),) = results
    assert not done and "rank 1" in error["message"], error
    assert server.process.wait(15) == 1, server.log()
    server.check_gone(family, 1.0)


def test_a_signal_while_ranks_start_leaves_nothing(model: Path) -> None:
    server = Server(model, "--tp", "2", wait=False)
    until(lambda: any("rank" in " ".join(process.cmdline()) for process in server.processes()), 20.0, "a rank")
    family = server.processes()
    server.signal(signal.SIGTERM)
    assert server.process.wait(10) == 0
    server.check_gone(family, 2.0)
    server.close()


def test_ranks_die_with_their_engine(server: Server) -> None:
    family = server.processes()
    engine = process_of(server, "engine")
    rank = process_of(server, "rank 1")
    engine.kill()
    _, alive = psutil.wait_procs([rank], timeout=3.0)
    assert not alive
    assert server.process.wait(15) == 1
    server.check_gone(family, 1.0)
