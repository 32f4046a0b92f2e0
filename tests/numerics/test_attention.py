"""The CPU attention backend against the reference in float32, and the choice between backends."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixlm.attention import cpu_plan
from radixlm.attention.base import AttentionBackend, Capabilities, LayerSpec, StepInputs
from radixlm.attention.cpu import CpuAttention
from radixlm.attention.cpu_plan import Span
from radixlm.attention.select import BACKENDS, choose, objection
from radixlm.attention.torch_ref import TorchReference
from radixlm.base.errors import StartupError
from radixlm.memory.pool import KVPool
from support.attention import attended, make_step

CPU = torch.device("cpu")
#: (start, length) of each span.
BATCHES = {
    "decode": [(0, 1), (17, 1), (300, 1), (63, 1), (64, 1)],
    "one row": [(70, 1)],
    "long row": [(700, 1)],
    "row of one page": [(13, 1)],
    "prompts": [(0, 1), (0, 33), (0, 129), (0, 200)],
    "extends": [(5, 40), (128, 64), (300, 7)],
    "mixed": [(100, 1), (0, 90), (40, 1), (37, 130)],
}
SPECS = {
    "gqa 3": LayerSpec(heads=9, kv_heads=3, head_dim=64, scale=0.125),
    "gqa 4": LayerSpec(heads=8, kv_heads=2, head_dim=128, scale=128**-0.5),
    "mqa": LayerSpec(heads=4, kv_heads=1, head_dim=256, scale=0.0625),
    "mha 80": LayerSpec(heads=3, kv_heads=3, head_dim=80, scale=80**-0.5),
    "mha 96": LayerSpec(heads=2, kv_heads=2, head_dim=96, scale=96**-0.5),
    "window": LayerSpec(heads=4, kv_heads=2, head_dim=64, scale=0.125, window=48),
    "window 1": LayerSpec(heads=2, kv_heads=1, head_dim=64, scale=0.125, window=1),
    "capped": LayerSpec(heads=4, kv_heads=2, head_dim=64, scale=0.125, soft_cap=5.0),
    "capped window": LayerSpec(heads=4, kv_heads=2, head_dim=64, scale=0.125, window=130, soft_cap=5.0),
}
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2}


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to the size of what is expected; infinite if a number is not finite."""
    if not torch.isfinite(got).all():
        return float("inf")
    return float((got.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("page_size", [1, 16, 32, 64])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_equal_to_the_reference(dtype: torch.dtype, spec: str, batch: str, page_size: int) -> None:
    inputs, pages = make_step(BATCHES[batch], page_size, CPU)
    expected = attended(TorchReference(), inputs, pages, SPECS[spec], dtype)
    assert error(attended(CpuAttention(fused=False), inputs, pages, SPECS[spec], dtype), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("spec", ["gqa 3", "mha 80", "window", "capped"])
def test_extends_through_fused_attention(spec: str, batch: str) -> None:
    """The way taken on processors with AMX, on whatever processor this is."""
    inputs, pages = make_step(BATCHES[batch], 16, CPU)
    expected = attended(TorchReference(), inputs, pages, SPECS[spec], torch.bfloat16)
    got = attended(CpuAttention(fused=True), inputs, pages, SPECS[spec], torch.bfloat16)
    assert error(got, expected) < TOLERANCE[torch.bfloat16]


def test_a_prompt_longer_than_a_tile() -> None:
    spec = LayerSpec(heads=2, kv_heads=1, head_dim=16, scale=0.25)
    inputs, pages = make_step([(0, 1), (90, 1100), (2000, 1)], 1, CPU)
    expected = attended(TorchReference(), inputs, pages, spec, torch.float32)
    assert error(attended(CpuAttention(), inputs, pages, spec, torch.float32), expected) < 1e-6


def sharing_step(shared: int, spans: list[tuple[int, int]], page_size: int) -> tuple[StepInputs, int]:
    """A step whose rows have the pages of their first `shared` positions in common."""
    inputs, pages = make_step(spans, page_size, CPU)
    rows = inputs.rows.tolist()
    for row, (start, _) in zip(rows, spans, strict=True):
        if start >= shared:
            inputs.page_table[row, : shared // page_size] = inputs.page_table[rows[0], : shared // page_size]
    return inputs, pages


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("spec", ["gqa 3", "mqa", "window", "capped"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_shared_prefix_is_read_once(dtype: torch.dtype, spec: str, page_size: int) -> None:
    spans = [(512, 1), (513, 1), (600, 1), (900, 1), (512, 1), (30, 1), (0, 20)]
    inputs, pages = sharing_step(512, spans, page_size)
    layer = SPECS[spec]
    _, decodes = cpu_plan.split(inputs)
    token_bytes = 2 * layer.kv_heads * layer.head_dim * dtype.itemsize
    groups = cpu_plan.groups(decodes, page_size, layer.window, token_bytes, 1)
    grouped = sum(len(group.rows) for group in groups if group.shared_len == 512)
    assert grouped == (0 if layer.window else 5)
    expected = attended(TorchReference(), inputs, pages, layer, dtype)
    assert error(attended(CpuAttention(), inputs, pages, layer, dtype), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("batch", ["decode", "one row", "extends", "mixed"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_cache_of_another_dtype(batch: str, fused: bool) -> None:
    """Keys and values are rounded once, when they are stored."""
    spec = SPECS["gqa 3"]
    inputs, pages = make_step(BATCHES[batch], 16, CPU)
    results = []
    backends: list[AttentionBackend] = [TorchReference(), CpuAttention(fused)]
    for backend in backends:
        generator = torch.Generator().manual_seed(1)
        pool = KVPool([(spec.kv_heads, spec.head_dim)], pages, 16, torch.bfloat16, CPU)
        pool.heads[0].copy_(torch.randn(pool.heads[0].shape, generator=generator))
        count = len(inputs.slots)
        q, k, v = (
            torch.randn(count, heads, spec.head_dim, generator=generator)
            for heads in (spec.heads, spec.kv_heads, spec.kv_heads)
        )
        results.append(backend.run(backend.plan(inputs, pool), 0, spec, pool, q, k, v))
    assert results[1].dtype == torch.float32
    assert error(results[1], results[0]) < 1e-6


def test_layers_of_different_kinds_share_a_plan() -> None:
    specs = [SPECS["gqa 3"], SPECS["window"], SPECS["capped"]]
    inputs, pages = make_step(BATCHES["mixed"], 16, CPU)
    results = []
    backends: list[AttentionBackend] = [TorchReference(), CpuAttention()]
    for backend in backends:
        generator = torch.Generator().manual_seed(1)
        pool = KVPool([(spec.kv_heads, spec.head_dim) for spec in specs], pages, 16, torch.float32, CPU)
        plan = backend.plan(inputs, pool)
        for layer in (0, 1, 2, 1, 0):
            spec = specs[layer]
            pool.heads[layer].copy_(torch.randn(pool.heads[layer].shape, generator=generator))
            q, k, v = (
                torch.randn(len(inputs.slots), heads, spec.head_dim, generator=generator)
                for heads in (spec.heads, spec.kv_heads, spec.kv_heads)
            )
            results.append(backend.run(plan, layer, spec, pool, q, k, v))
    for expected, got in zip(results[:5], results[5:], strict=True):
        assert error(got, expected) < 1e-6


def test_unwritten_memory_is_never_read() -> None:
    """A pool is not cleared: what no row has written may hold anything."""
    spec = SPECS["gqa 3"]
    inputs, pages = make_step([(0, 1), (0, 5), (0, 40)], 16, CPU)
    pool = KVPool([(spec.kv_heads, spec.head_dim)], pages, 16, torch.float32, CPU)
    pool.heads[0].fill_(torch.nan)
    count = len(inputs.slots)
    q, k, v = (torch.randn(count, heads, spec.head_dim) for heads in (spec.heads, spec.kv_heads, spec.kv_heads))
    backend = CpuAttention()
    assert torch.isfinite(backend.run(backend.plan(inputs, pool), 0, spec, pool, q, k, v)).all()


def test_the_pool_has_one_memory_under_three_names() -> None:
    pool = KVPool([(2, 4)], 3, 4, torch.float32, CPU)
    k, v = torch.randn(5, 2, 4), torch.randn(5, 2, 4)
    pool.write(0, torch.tensor([3, 1, 9, 0, 2]), k, v)
    assert torch.equal(pool.keys[0][[3, 1, 9, 0, 2]], k)
    assert torch.equal(pool.values[0][[3, 1, 9, 0, 2]], v)
    pool.write(0, slice(4, 9), k, v)
    assert torch.equal(pool.heads[0][:2, 4:9], k.transpose(0, 1))
    assert torch.equal(pool.heads[0][2:, 4:9], v.transpose(0, 1))
    assert pool.bytes == 2 * 2 * 4 * 12 * 4


@given(
    seed=st.integers(0, 2**32 - 1),
    page_size=st.sampled_from([1, 4, 16]),
    ends=st.lists(st.integers(1, 400), min_size=1, max_size=12),
    shared=st.integers(0, 300),
    window=st.sampled_from([0, 1, 7, 100, 1000]),
)
@settings(max_examples=150, deadline=None)
def test_every_row_reads_exactly_what_it_sees(
    seed: int, page_size: int, ends: list[int], shared: int, window: int
) -> None:
    """Over all groups, each row is there once, and its shared and own slots are those of its positions, in order."""
    rng = np.random.default_rng(seed)
    pool = rng.permutation(len(ends) * 400 // page_size + 500).astype(np.int64)
    common = pool[-400:]
    spans, used = [], 0
    for end in ends:
        count = -(-end // page_size)
        pages = pool[used : used + count].copy()
        used += count
        same = min(shared, end - 1) // page_size
        pages[:same] = common[:same]
        spans.append(Span(0, 1, end - 1, pages))
    groups = cpu_plan.groups(spans, page_size, window, token_bytes=4096, score_bytes=8)
    assert sorted(row for group in groups for row in group.rows) == list(range(len(ends)))
    for group in groups:
        where = group.shared
        head = [] if where is None else list(range(1 << 20))[where] if isinstance(where, slice) else where.tolist()
        assert len(head) == group.shared_len
        for own, count, row in zip(group.own, group.own_lens, group.rows, strict=True):
            end = ends[row]
            begin = max(0, end - window) if window else 0
            positions = np.arange(begin, end)
            expected = spans[row].pages[positions // page_size] * page_size + positions % page_size
            assert [*head, *own[:count].tolist()] == expected.tolist()
            assert (own[count:] == own[count - 1]).all()


def test_blocks_are_bounded_and_little_padded() -> None:
    rng = np.random.default_rng(0)
    ends = rng.integers(1, 4000, 200)
    spans = [Span(0, 1, int(end) - 1, np.arange(index * 5000, index * 5000 + end)) for index, end in enumerate(ends)]
    groups = cpu_plan.groups(spans, 1, 0, token_bytes=768, score_bytes=18)
    for group in groups:
        assert group.own.size * 768 <= cpu_plan.BLOCK_BYTES or len(group.rows) == 1
    padded = sum(group.own.size for group in groups)
    assert padded < 1.2 * ends.sum()


def test_choosing_explains_itself() -> None:
    specs = [SPECS["gqa 3"]]
    backend, choice = choose("auto", "cpu", torch.bfloat16, specs, 1)
    assert isinstance(backend, CpuAttention)
    assert choice.name == "cpu"
    backend, choice = choose("auto", "cpu", torch.float64, specs, 1)
    assert isinstance(backend, TorchReference)
    assert "float64" in choice.rejected["cpu"]
    assert choose("torch_ref", "cpu", torch.bfloat16, specs, 16)[1].reason == "asked for"
    with pytest.raises(StartupError, match=r"cpu.*runs on cpu, not on cuda"):
        choose("cpu", "cuda", torch.bfloat16, specs, 1)
    with pytest.raises(StartupError, match="unknown attention backend 'flesh'; known: cpu"):
        choose("flesh", "cpu", torch.bfloat16, specs, 1)


@pytest.mark.parametrize(
    ("able", "reason"),
    [
        (Capabilities(frozenset({"cpu"})), None),
        (Capabilities(frozenset(), head_dims=frozenset({32, 128})), "has head sizes 128, 32, not 64"),
        (Capabilities(frozenset(), page_sizes=frozenset({16})), "has page sizes 16, not 1"),
        (Capabilities(frozenset(), window=False), "has no sliding window, which the model needs"),
        (Capabilities(frozenset(), soft_cap=False), "cannot cap scores, which the model needs"),
        (Capabilities(frozenset(), requires=("no_such_module",)), "needs no_such_module, which is not installed"),
    ],
    ids=lambda value: None if isinstance(value, Capabilities) else str(value),
)
def test_objections(able: Capabilities, reason: str | None) -> None:
    assert objection(able, "cpu", torch.float32, [SPECS["capped window"]], 1, torch.float32) == reason


def test_a_cache_of_other_numbers_is_refused_by_those_who_cannot_read_it() -> None:
    able = Capabilities(frozenset(), kv_dtypes=frozenset({torch.float16}))
    assert objection(able, "cpu", torch.float32, [], 1, torch.float16) is None
    reason = objection(able, "cpu", torch.float32, [], 1, torch.float8_e4m3fn)
    assert reason == "keeps keys and values in float16, float32, not in float8_e4m3fn"


def test_the_registry_and_the_backends_agree() -> None:
    for entry in BACKENDS:
        bare = Capabilities(frozenset(), requires=entry.capabilities.requires)
        if objection(bare, "", torch.float32, [], 1, torch.float32) is None:
            assert entry.load()().capabilities == entry.capabilities
