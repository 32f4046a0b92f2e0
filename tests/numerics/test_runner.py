"""The runner, driven by random plans, against a loop that recomputes everything: a small model with real attention."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from radixlm.attention.base import Capabilities, LayerSpec, Step, StepInputs
from radixlm.base.plan import Join, Plan, TokenScores
from radixlm.base.request import LogprobParams
from radixlm.base.sampling import SamplingParams
from radixlm.device.cpu import CpuDevice
from radixlm.memory.pool import KVPool
from radixlm.memory.table import RowTables
from radixlm.runner.runner import Runner
from radixlm.sampling.sampler import NOT_FINITE, REASONS
from support.crowd import Crowd, Job, make_facts

VOCAB, PADDED, HIDDEN, HEADS, KV_HEADS, DIM, LAYERS, CONTEXT = 61, 3, 32, 4, 2, 8, 2, 160
POISON = VOCAB  # the id whose embedding is not a number, where a test wants one; never sampled
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The model is so small that a second thread only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class PagedAttention:
    """Attention through the page table, one span at a time."""

    capabilities = Capabilities(devices=frozenset({"cpu"}))

    def plan(self, inputs: StepInputs, pool: KVPool) -> StepInputs:
        return inputs

    def run(
        self,
        plan: StepInputs,
        layer: int,
        spec: LayerSpec,
        pool: KVPool,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        pool.write(layer, plan.slots, k, v)
        outputs, offset = [], 0
        for row, start, length in zip(plan.rows, plan.starts, plan.lengths, strict=True):
            positions = torch.arange(start + length)
            pages = plan.page_table[row, positions // plan.page_size].long()
            slots = pages * plan.page_size + positions % plan.page_size
            span = q[offset : offset + length]
            outputs.append(causal(span, pool.keys[layer][slots], pool.values[layer][slots], start, spec.scale))
            offset += length
        return torch.cat(outputs)


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, scale: float) -> torch.Tensor:
    """q [T, heads, d] at positions from `start` on, k and v [S, kv_heads, d] at positions from 0 on."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) * scale
    future = torch.arange(k.shape[0])[None, :] > torch.arange(start, start + len(q))[:, None]
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, v).flatten(1)


class TinyModel:
    """Two pre-norm layers with grouped heads. `forward` is the server's, `naive` sees whole texts and no pages."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random_weights(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])

        self.layers: Sequence[LayerSpec] = [LayerSpec(HEADS, KV_HEADS, DIM, DIM**-0.5)] * LAYERS
        self.vocab_size, self.hidden_size = VOCAB + PADDED, HIDDEN
        self.embed = random_weights(self.vocab_size, HIDDEN) * 6
        self.place = random_weights(CONTEXT, HIDDEN) * 3
        self.q = [random_weights(HEADS * DIM, HIDDEN) * 2 for _ in self.layers]
        self.k = [random_weights(KV_HEADS * DIM, HIDDEN) * 2 for _ in self.layers]
        self.v = [random_weights(KV_HEADS * DIM, HIDDEN) for _ in self.layers]
        self.o = [random_weights(HIDDEN, HEADS * DIM) * 2 for _ in self.layers]
        self.up = [random_weights(2 * HIDDEN, HIDDEN) for _ in self.layers]
        self.down = [random_weights(HIDDEN, 2 * HIDDEN) for _ in self.layers]
        self.out = random_weights(self.vocab_size, HIDDEN) * 3
        self.out[VOCAB:] *= 5  # padding that would often win
        self.scratch = 0  # bytes taken by a step of more than one token, to run out of memory

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, step: Step) -> torch.Tensor:
        if len(ids) > 1 and self.scratch:
            torch.empty(self.scratch, dtype=torch.uint8)
        return self._layers(ids, positions, step.attend)

    def naive(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits [len(tokens), VOCAB] of a whole text, without padding ids."""
        ids = torch.tensor(tokens)
        hidden = self._layers(
            ids, torch.arange(len(ids)), lambda layer, q, k, v: causal(q, k, v, 0, self.layers[layer].scale)
        )
        return self.head(hidden)[:, :VOCAB]

    def _layers(self, ids: torch.Tensor, positions: torch.Tensor, attend: Any) -> torch.Tensor:
        x = self.embed[ids] + self.place[positions]
        for i in range(LAYERS):
            h = F.rms_norm(x, (HIDDEN,))
            q, k, v = (h @ w[i].T for w in (self.q, self.k, self.v))
            q, k, v = (y.unflatten(1, (-1, DIM)) for y in (q, k, v))
            x = x + attend(i, q, k, v) @ self.o[i].T
            x = x + F.silu(F.rms_norm(x, (HIDDEN,)) @ self.up[i].T) @ self.down[i].T
        return F.rms_norm(x, (HIDDEN,))

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.out.T

    def parameter_count(self) -> int:
        return self.embed.numel()

    def weight_bytes(self) -> int:
        return self.embed.numel() * 4


@dataclass
class Setting:
    rows: int = 6
    page_size: int = 1
    chunk: int = 7
    depth: int = 1
    seed: int = 0
    calm: bool = False

    @property
    def pages(self) -> int:
        return self.rows * CONTEXT // self.page_size

    def runner(self, model: TinyModel) -> Runner:
        facts = make_facts(
            vocab=VOCAB,
            padded=PADDED,
            rows=self.rows,
            pages=self.pages,
            page_size=self.page_size,
            context=CONTEXT,
            eos=(5,),
        )
        shapes = [(spec.kv_heads, spec.head_dim) for spec in model.layers]
        pool = KVPool(shapes, self.pages, self.page_size, torch.float32, torch.device("cpu"))
        return Runner(model, pool, PagedAttention(), PagedAttention(), CpuDevice(), facts)

    def crowd(self, runner: Runner) -> Crowd:
        return Crowd(
            runner, rows=self.rows, pages=self.pages, page_size=self.page_size, chunk=self.chunk, depth=self.depth,
            seed=self.seed, calm=self.calm,
        )  # fmt: skip

    def run(self, model: TinyModel, jobs: list[Job]) -> list[Job]:
        return self.crowd(self.runner(model)).run(jobs)


ALONE = Setting(rows=1, chunk=CONTEXT, calm=True)


def make_jobs(seed: int, wishes: Sequence[SamplingParams], count: int = 16) -> list[Job]:
    rng = random.Random(seed)
    stem = [rng.randrange(VOCAB) for _ in range(40)]
    jobs = []
    for uid in range(count):
        prompt = stem[: rng.choice([0, 16, 33, 40])] + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))]
        jobs.append(Job(uid, prompt, wishes[uid % len(wishes)]))
    return jobs


def naive_greedy(model: TinyModel, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model.naive(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


# ---- texts


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("chunk", "depth"), [(1, 1), (7, 2), (CONTEXT, 1), (16, 3)])
def test_greedy_text_equals_a_naive_loop(page_size: int, chunk: int, depth: int) -> None:
    model = TinyModel()
    jobs = make_jobs(chunk, [GREEDY])
    Setting(page_size=page_size, chunk=chunk, depth=depth, seed=chunk + depth).run(model, jobs)
    for job in jobs:
        assert job.failed is None
        assert job.output == naive_greedy(model, job.prompt, 12)
    assert len({tuple(job.output) for job in jobs}) > 10  # the model does not just repeat itself


WISHES = [
    msgspec.structs.replace(params, max_new_tokens=10)
    for params in (
        GREEDY,
        SamplingParams(seed=1),
        SamplingParams(seed=2, temperature=0.7, top_p=0.9),
        SamplingParams(seed=3, temperature=1.5, top_k=8, min_p=0.02),
        SamplingParams(temperature=0.0, repetition_penalty=1.5),
        SamplingParams(seed=4, frequency_penalty=1.0, presence_penalty=0.5),
        SamplingParams(seed=5, temperature=1.2, logit_bias=((3, 2.0), (VOCAB + 1, 100.0))),
        SamplingParams(temperature=0.0, min_new_tokens=8, stop_token_ids=(9, 10)),
    )
]


@pytest.mark.parametrize(("page_size", "depth", "seed"), [(1, 1, 1), (16, 2, 2), (1, 2, 3)])
def test_any_text_is_the_same_alone_and_in_any_company(page_size: int, depth: int, seed: int) -> None:
    model = TinyModel()
    jobs = make_jobs(seed, WISHES)
    Setting(page_size=page_size, depth=depth, seed=seed).run(model, jobs)
    for job in jobs:
        (solo,) = ALONE.run(model, [Job(0, job.prompt, job.sampling)])
        assert job.output == solo.output
        assert max(job.output) < VOCAB
        if job.sampling.min_new_tokens:
            assert not {5, 9, 10} & set(job.output[:8])


def test_penalties_reach_the_text() -> None:
    """Greedy under a penalty, against a loop that applies the formula to a list."""
    model = TinyModel()
    params = SamplingParams(temperature=0.0, max_new_tokens=15, repetition_penalty=1.3, frequency_penalty=0.8)
    (job,) = Setting(chunk=3, depth=2).run(model, [Job(0, [3, 1, 4, 1, 5], params)])
    tokens = list(job.prompt)
    for _ in range(15):
        scores = model.naive(tokens)[-1].tolist()
        for token in set(tokens):
            scores[token] = scores[token] / 1.3 if scores[token] > 0 else scores[token] * 1.3
            scores[token] -= 0.8 * tokens[5:].count(token)
        tokens.append(max(range(VOCAB), key=scores.__getitem__))
    assert job.output == tokens[5:]
    assert job.output != naive_greedy(model, job.prompt, 15)


# ---- log-probabilities


def by_position(parts: list[TokenScores]) -> dict[int, tuple[float, list[int], list[float], list[float]]]:
    found = {}
    for part in parts:
        for i in range(len(part.chosen)):
            found[part.position + i] = (
                float(part.chosen[i]), part.top_ids[i].tolist(), part.top[i].tolist(), part.picked[i].tolist()
            )  # fmt: skip
    return found


@pytest.mark.parametrize(("chunk", "part"), [(3, 64), (CONTEXT, 2), (7, 64)])
@pytest.mark.parametrize("prompt_from", [-1, 0, 5, 39])
def test_log_probabilities_equal_those_of_the_naive_model(prompt_from: int, chunk: int, part: int) -> None:
    model = TinyModel()
    asked = LogprobParams(top=3, prompt_from=prompt_from, token_ids=(7, VOCAB))
    jobs = make_jobs(5, [GREEDY, msgspec.structs.replace(GREEDY, max_new_tokens=0), WISHES[2]], 9)
    for job in jobs[:6]:
        job.logprobs = asked
    setting = Setting(chunk=chunk, depth=2, seed=chunk)
    runner = setting.runner(model)
    runner._scorer.part = part
    setting.crowd(runner).run(jobs)
    for job in jobs:
        assert len(job.scores) == (len(job.output) if job.logprobs is not None else 0)
        found = by_position(job.scores) | by_position(job.prompt_scores)
        first = max(prompt_from, 1) if prompt_from >= 0 else len(job.prompt)
        first = min(first, len(job.prompt))
        assert sorted(found) == (list(range(first, len(job.known))) if job.logprobs is not None else [])
        raw = torch.log_softmax(model.naive(job.known).double(), -1)
        for position, (chosen, top_ids, top, picked) in found.items():
            expected = raw[position - 1]
            assert chosen == pytest.approx(float(expected[job.known[position]]), abs=1e-4)
            assert top_ids == expected.topk(3).indices.tolist()
            assert top == pytest.approx(expected.topk(3).values.tolist(), abs=1e-4)
            assert picked == pytest.approx([float(expected[7]), -9999.0], abs=1e-4)


def test_a_prompt_of_one_token_is_scored_as_nothing() -> None:
    params = msgspec.structs.replace(GREEDY, max_new_tokens=0)
    (job,) = Setting().run(TinyModel(), [Job(0, [4], params, LogprobParams(top=2, prompt_from=0))])
    (part,) = job.prompt_scores
    assert (part.position, part.chosen.shape, part.top.shape) == (1, (0,), (0, 2))


# ---- failures


def test_numbers_that_are_none_stay_with_their_request() -> None:
    model = TinyModel()
    healthy = make_jobs(6, WISHES, 12)
    before = [job.output for job in Setting(seed=6).run(model, make_jobs(6, WISHES, 12))]
    model.embed[POISON] = torch.nan
    asked = LogprobParams(prompt_from=0)
    broken = [
        Job(100, [POISON], GREEDY),
        Job(101, [1, 2, POISON, 3], WISHES[1]),
        Job(102, [1, 2, POISON], msgspec.structs.replace(GREEDY, max_new_tokens=0), asked),
        Job(103, [4, 5, POISON, 6], GREEDY, asked),
    ]
    Setting(depth=2, seed=7).run(model, [*healthy, *broken])
    assert [job.failed for job in broken] == [REASONS[NOT_FINITE]] * 3 + [REASONS[NOT_FINITE]]
    assert [job.failed for job in healthy] == [None] * 12
    assert [job.output for job in healthy] == before


def test_a_step_without_memory_fails_and_the_next_one_runs() -> None:
    model = TinyModel()
    setting = Setting(calm=True, chunk=CONTEXT)
    runner = setting.runner(model)
    model.scratch = 1 << 60
    jobs = setting.crowd(runner).run(make_jobs(8, WISHES, 6))
    assert all("not enough memory for a step of" in (job.failed or "") for job in jobs)
    model.scratch = 0
    jobs = setting.crowd(runner).run(make_jobs(8, WISHES, 6))
    assert [job.output for job in jobs] == [job.output for job in setting.run(model, make_jobs(8, WISHES, 6))]


def test_other_errors_are_not_hidden() -> None:
    model = TinyModel()
    model.q[1] = model.q[1][:, :5]
    with pytest.raises(RuntimeError, match="shape"):
        Setting().run(model, make_jobs(9, WISHES, 1))


# ---- the rest


@pytest.mark.parametrize("page_size", [1, 16])
def test_warming_up_leaves_nothing_behind(page_size: int) -> None:
    model = TinyModel()
    setting = Setting(page_size=page_size)
    runner = setting.runner(model)
    runner.warm_up()
    jobs = setting.crowd(runner).run(make_jobs(10, [GREEDY], 6))
    assert [job.output for job in jobs] == [naive_greedy(model, job.prompt, 12) for job in jobs]


def test_tables_take_writes_in_order() -> None:
    tables = RowTables(3, 20, 4, CpuDevice())

    def apply(joins: tuple[Join, ...], writes: list[tuple[int, int, int]]) -> None:
        table = np.array(writes, np.int32).reshape(-1, 3)
        none = np.empty(0, np.int32)
        tables.apply(Plan(0, none, none, none, np.empty(0, np.bool_), joins, table[:, 0], table[:, 1], table[:, 2]))

    tokens = np.array([9, 8, 7, 6, 5], np.int32)
    tokens.setflags(write=False)
    join = Join(1, 0, tokens, np.array([40], np.int32), 5, GREEDY)
    apply((join,), [(1, 1, 41), (2, 0, 50), (1, 1, 42), (1, 0, 43), (1, 1, 44)])
    assert tables.pages[1, :3].tolist() == [43, 44, 0]
    assert tables.pages[2, :2].tolist() == [50, 0]
    assert tables.tokens[1, :6].tolist() == [9, 8, 7, 6, 5, 0]
    assert tables.pages_per_row == 6 and tables.columns == 21
