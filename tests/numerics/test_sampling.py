"""Sampling against exact distributions, brute-force oracles and itself in other company."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from radixlm.base.request import LogprobParams
from radixlm.base.sampling import GREEDY_TEMPERATURE, SamplingParams
from radixlm.device.cpu import CpuDevice
from radixlm.sampling import rank
from radixlm.sampling.draw import BLOCK, draw_filtered, draw_free, race, times
from radixlm.sampling.filters import CANDIDATES, Wishes, cuts, shortlist
from radixlm.sampling.logprobs import LOWEST, Scorer, take
from radixlm.sampling.sampler import NOT_FINITE, NOTHING_ALLOWED, OK
from radixlm.sampling.uniform import uniforms
from support.sampling import EOS, WISHES, Bench

DEVICE = CpuDevice()


def one(params: SamplingParams, logits: torch.Tensor, prompt: Sequence[int] = (0,), output: Sequence[int] = ()) -> int:
    sampled = Bench([(params, prompt, output)], logits.shape[-1]).sample(logits[None])
    assert sampled.status.tolist() == [OK]
    return int(sampled.tokens[0])


def make_wishes(rows: int, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float = 0.5) -> Wishes:
    figures = (temperature, float(top_k), top_p, min_p, uniform)
    return Wishes(*(torch.full((rows,), figure, dtype=torch.float64) for figure in figures))


# ---- oracles, written for clarity: float64, one row, full sorts


def kept_set(logits: npt.NDArray[np.float32], params: SamplingParams) -> tuple[set[int], float]:
    """The ids that may be drawn, and how close to the edge of top_p any of them was, as a share of all mass."""
    scaled = logits.astype(np.float64) / params.temperature
    weights = np.exp(scaled - scaled.max())
    _, which, counts = np.unique(-logits, return_inverse=True, return_counts=True)
    masses = np.bincount(which, weights)
    larger = (counts.cumsum() - counts)[which]  # how many tokens have a larger score
    larger_mass = (masses.cumsum() - masses)[which]  # and their weight together
    count = len(logits) if params.top_k < 0 else min(params.top_k, len(logits))
    kept = (larger < count) & (weights >= params.min_p * weights.max())
    margin = 1.0
    if params.top_p < 1:
        limit = params.top_p * np.sort(weights)[::-1][:count].sum()
        kept &= larger_mass < limit
        margin = float(np.abs(larger_mass - limit).min() / weights.sum())
    return set(np.flatnonzero(kept).tolist()), margin


def distribution(logits: npt.NDArray[np.float32], params: SamplingParams) -> npt.NDArray[np.float64]:
    scaled = logits.astype(np.float64) / params.temperature
    kept = np.isin(np.arange(len(logits)), list(kept_set(logits, params)[0]))
    weights = np.where(kept, np.exp(scaled - scaled.max()), 0.0)
    return weights / weights.sum()


def penalised(
    logits: npt.NDArray[np.float32], params: SamplingParams, prompt: list[int], output: list[int]
) -> list[float]:
    scores = [float(x) for x in logits]
    for token in set(prompt + output):
        r = params.repetition_penalty
        scores[token] = scores[token] / r if scores[token] > 0 else scores[token] * r
    for token in set(output):
        scores[token] -= output.count(token) * params.frequency_penalty + params.presence_penalty
    return scores


# ---- randomness


def test_uniforms_are_uniform_and_independent() -> None:
    seeds, positions = np.divmod(np.arange(200_000), 400)
    numbers = uniforms(seeds, positions)
    assert numbers.min() >= 0.0 and numbers.max() < 1.0
    counts = np.histogram(numbers, 100, (0, 1))[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 149  # chi-square, 99 degrees of freedom, p = 0.001
    grid = numbers.reshape(500, 400)
    for a, b in ((grid[:-1], grid[1:]), (grid[:, :-1], grid[:, 1:])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.01


def test_uniforms_are_a_function_of_seed_and_position() -> None:
    seeds = np.array([0, 1, -1, 2**63 - 1, -(2**63)], np.int64)
    alone = [uniforms(seeds[i : i + 1], np.array([9]))[0] for i in range(5)]
    assert uniforms(seeds, np.full(5, 9)).tolist() == alone
    assert len(set(alone)) == 5
    # Pinned: a change of the hash changes the text that every seed in the world gives.
    assert uniforms(np.array([42]), np.array([7]))[0] == pytest.approx(0.19535155971618223, abs=1e-15)


# ---- distributions

KNOBS = [
    SamplingParams(),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=2.0, top_k=5),
    SamplingParams(top_p=0.7),
    SamplingParams(min_p=0.2),
    SamplingParams(temperature=1.5, top_k=12, top_p=0.8, min_p=0.05),
]


@pytest.mark.parametrize("params", KNOBS, ids=str)
def test_draws_follow_the_exact_distribution(params: SamplingParams) -> None:
    """Chi-square over 20,000 draws, one for each seed."""
    vocab, draws = 40, 20_000
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(5)) * 1.5
    bench = Bench([(msgspec.structs.replace(params, seed=seed), [0], []) for seed in range(draws)], vocab)
    counts = np.bincount(bench.sample(logits.expand(draws, -1)).tokens.numpy(), minlength=vocab)
    expected = distribution(logits.numpy(), params) * draws
    assert counts[expected == 0].sum() == 0
    # Chi-square is for cells with a handful of draws: the rare ids are one cell.
    often = expected >= 5
    counts, expected = (np.append(cells[often], cells[~often].sum()) for cells in (counts, expected))
    possible = expected > 0
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    degrees = int(possible.sum()) - 1
    assert statistic < degrees + 3.3 * np.sqrt(2 * degrees) + 8  # above the 99.9th percentile


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    vocab=st.sampled_from([2, 17, 300, 9001]),
    scale=st.sampled_from([0.05, 1.0, 4.0]),
    temperature=st.sampled_from([0.3, 1.0, 3.0]),
    top_k=st.sampled_from([-1, 1, 2, 40, CANDIDATES, CANDIDATES + 1, 1000, 10**9]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 1e-9]),
    min_p=st.sampled_from([0.0, 0.001, 0.1, 1.0]),
    coarse=st.booleans(),
)
def test_kept_tokens_equal_the_oracle(
    seed: int, vocab: int, scale: float, temperature: float, top_k: int, top_p: float, min_p: float, coarse: bool
) -> None:
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(seed)) * scale
    if coarse:
        logits = (logits * 4).round() / 4  # many ties, as 16-bit scores have
    wishes = make_wishes(3, temperature, min(top_k, vocab) if top_k > 0 else vocab, top_p, min_p)
    _, _, cut = shortlist(logits, wishes)
    assert torch.equal(logits >= cut[:, None], logits >= cuts(logits, wishes)[:, None])
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for row, value in zip(logits, cut, strict=True):
        expected, margin = kept_set(row.numpy(), params)
        assume(margin > 1e-6)  # float32 may decide otherwise where the mass is on the edge
        assert set((row >= value).nonzero()[:, 0].tolist()) == expected


def test_times_are_exponential_and_independent() -> None:
    numbers = torch.from_numpy(uniforms(np.arange(400), np.zeros(400, np.int64)))
    found = times(numbers, torch.arange(-100, 400))
    assert found.min() >= 0 and bool(torch.isfinite(found).all())
    shares = torch.histc((-found).exp(), 100, 0, 1)  # uniform, if the times are exponential
    assert float(((shares - 2000) ** 2 / 2000).sum()) < 149  # chi-square, 99 degrees of freedom, p = 0.001
    for a, b in ((found[:-1], found[1:]), (found[:, :-1], found[:, 1:])):
        assert abs(np.corrcoef(a.flatten(), b.flatten())[0, 1]) < 0.01
    # Pinned: a change of the hash changes the text that every seed in the world gives.
    assert float(times(torch.tensor([0.5], dtype=torch.float64), torch.tensor([7]))[0, 0]) == pytest.approx(
        0.79230024446834, abs=1e-12
    )


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10_000), blocks=st.sampled_from([1, 2, 13]), number=st.floats(0, 1, exclude_max=True))
def test_a_race_has_the_winner_that_the_oracle_names(seed: int, blocks: int, number: float) -> None:
    """The oracle runs every heat by itself, in numpy."""
    weights = torch.rand(4, blocks * BLOCK, generator=torch.Generator().manual_seed(seed)) ** 8
    weights[:, ::3] = 0.0
    numbers = torch.full((4,), number, dtype=torch.float64)
    found = race(weights, numbers)
    by_block = times(numbers, -1 - torch.arange(blocks)).numpy()
    by_id = times(numbers, torch.arange(blocks * BLOCK)).numpy()
    for row, token, first, second in zip(weights.numpy(), found.tolist(), by_block, by_id, strict=True):
        assert row[token] > 0
        block = int(np.argmin(first / row.reshape(blocks, BLOCK).sum(1, dtype=np.float64)))
        ids = [i for i in range(block * BLOCK, (block + 1) * BLOCK) if row[i] > 0]
        assert token == min(ids, key=lambda i: second[i] / float(row[i]))


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    number=st.floats(0, 1, exclude_max=True),
    top_k=st.integers(1, 100),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
)
def test_a_draw_from_the_best_is_the_race_among_them(seed: int, number: float, top_k: int, temperature: float) -> None:
    """A list of the best gives what the whole vocabulary gives, as a GPU draws it."""
    vocab = 4 * BLOCK
    scores = torch.randn(3, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    wishes = make_wishes(3, temperature, top_k, 1.0, 0.0, number)
    kept = scores >= scores.topk(top_k).values[:, -1:]
    weights = torch.where(kept, (scores.double() / temperature).softmax(-1), 0.0)
    assert draw_filtered(scores, wishes).tolist() == race(weights, wishes.uniform).tolist()


@pytest.mark.parametrize("number", [0.0, 0.25, 1 - 2.0**-53])
def test_an_id_without_weight_never_wins(number: float) -> None:
    weights = torch.zeros(1, 4 * BLOCK)
    weights[0, 3 * BLOCK - 1] = 1e-30
    assert race(weights, torch.tensor([number], dtype=torch.float64)).tolist() == [3 * BLOCK - 1]


@pytest.mark.parametrize("top_k", [-1, 50])
def test_a_draw_is_steady_under_rounding(top_k: int) -> None:
    """Scores that another batch rounds differently give the same tokens, over the length of a long text."""
    generator = torch.Generator().manual_seed(6)
    differ = 0
    for step in range(40):
        scores = torch.randn(50, 49152, generator=generator) * 4
        rounded = scores + torch.randn(50, 49152, generator=generator) * 2e-6
        wishes = make_wishes(50, 1.0, top_k if top_k > 0 else 49152, 1.0, 0.0)
        wishes.uniform[:] = torch.from_numpy(uniforms(np.arange(50), np.full(50, step)))
        draw = draw_free if top_k < 0 else draw_filtered
        differ += int((draw(scores, wishes) != draw(rounded, wishes)).sum())
    assert differ == 0


# ---- greedy


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-38, 1e-12, 1e-6, 1e-4])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(temperature=temperature, seed=4, top_p=0.5)
    assert one(params, logits) == int(logits.argmax())


def test_the_smallest_temperature_that_draws_gives_the_best_token() -> None:
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(1)) * 100
    for seed in range(50):
        assert one(SamplingParams(temperature=GREEDY_TEMPERATURE, seed=seed), logits) == int(logits.argmax())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_of_equal_scores_the_lowest_id_is_greedy(dtype: torch.dtype) -> None:
    logits = torch.zeros(500, dtype=dtype)
    logits[[77, 78, 400]] = 2.0
    assert one(SamplingParams(temperature=0.0), logits) == 77
    assert one(SamplingParams(temperature=1.0, top_k=1), logits) == 77


def test_a_top_k_beyond_the_vocabulary_is_none() -> None:
    logits = torch.randn(300, generator=torch.Generator().manual_seed(2))
    for seed in range(100):
        texts = {one(SamplingParams(temperature=1.5, seed=seed, top_k=k), logits) for k in (-1, 300, 10**9)}
        assert len(texts) == 1


# ---- one row in any company


@pytest.mark.parametrize("vocab", [1000, 49152])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_gets_the_same_alone_and_in_any_batch(vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    shuffled = np.random.default_rng(3)
    rows = [
        (WISHES[i % len(WISHES)], shuffled.integers(0, vocab, 5 + i).tolist(), shuffled.integers(0, vocab, i).tolist())
        for i in range(16)
    ]
    logits = (torch.randn(16, vocab, generator=generator) * 3).to(dtype)
    bench = Bench(rows, vocab)
    alone = [int(bench.sample(logits[i : i + 1], [i]).tokens[0]) for i in range(16)]
    assert bench.sample(logits).tokens.tolist() == alone
    for size in (2, 5, 11, 16):
        order = shuffled.permutation(16)[:size]
        assert bench.sample(logits[order], order.tolist()).tokens.tolist() == [alone[i] for i in order]


def test_intermediate_numbers_are_the_same_bit_for_bit_in_any_batch() -> None:
    """The token could agree by luck: its weights, its cut and its log-probabilities must agree too."""
    logits = torch.randn(16, 49152, generator=torch.Generator().manual_seed(4)) * 3
    scorer = Scorer(49152, DEVICE)
    tokens = torch.arange(16) * 1000
    asked = [LogprobParams(top=20, token_ids=(5, 6))] * 16
    everybody = scorer.score(lambda a, b: logits[a:b], tokens, asked)
    weights = torch.softmax(logits, -1)
    totals = weights.view(16, -1, BLOCK).sum(-1)
    for i in range(16):
        row = logits[i : i + 1]
        single = scorer.score(lambda a, b, row=row: row[a:b], tokens[i : i + 1], asked[:1])
        for together, alone in zip(everybody.tensors(), single.tensors(), strict=True):
            assert torch.equal(together[i : i + 1], alone)
        assert torch.equal(torch.softmax(row, -1), weights[i : i + 1])
        assert torch.equal(torch.softmax(row, -1).view(1, -1, BLOCK).sum(-1), totals[i : i + 1])


def test_seeds_give_the_same_and_different_texts() -> None:
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(6))
    positions = [[0] * length for length in range(1, 25)]

    def text(seed: int) -> list[int]:
        return [one(SamplingParams(seed=seed), logits, prompt) for prompt in positions]

    assert text(42) == text(42)
    assert len({tuple(text(seed)) for seed in (42, 43, 0, -1, 2**63 - 1)}) == 5


# ---- adjustments


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    repetition=st.sampled_from([1.0, 1.7, 0.4]),
    frequency=st.sampled_from([0.0, 0.7, -2.0]),
    presence=st.sampled_from([0.0, 1.1, -2.0]),
    prompt_len=st.integers(1, 12),
    output_len=st.integers(0, 12),
)
def test_penalties_equal_the_formula(
    seed: int, repetition: float, frequency: float, presence: float, prompt_len: int, output_len: int
) -> None:
    vocab = 12
    generator = np.random.default_rng(seed)
    params = SamplingParams(
        temperature=0.0, repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence
    )
    rows = []
    for extra in (0, 3):  # rows of different lengths share the padding
        prompt = generator.integers(0, vocab, prompt_len + extra).tolist()
        rows.append((params, prompt, generator.integers(0, vocab, output_len).tolist()))
    rows.append((SamplingParams(temperature=0.0), [1], [2]))
    logits = torch.from_numpy(generator.normal(size=(3, vocab)).astype(np.float32)) * 3
    bench = Bench(rows, vocab)
    batch = bench.table.batch(np.arange(3), bench.known)
    untouched = logits.clone()
    scores = bench.sampler._adjuster.adjusted(logits, batch, {})
    assert torch.equal(logits, untouched)
    for row, (params, prompt, output) in enumerate(rows):
        expected = penalised(logits[row].numpy(), params, prompt, output)
        assert scores[row].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)
    again = bench.sampler._adjuster.adjusted(logits, batch, {})
    assert torch.equal(again, scores)  # no counts are left over


def test_ids_without_a_score_are_penalised_nowhere() -> None:
    """A prompt may hold ids of the padding; they must not spill into the row after."""
    vocab = 10
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0)
    bench = Bench([(params, [1, vocab, vocab + 3], [vocab + 1]), (params, [2], [3])], vocab)
    logits = torch.ones(2, vocab)
    scores = bench.sampler._adjuster.adjusted(logits, bench.table.batch(np.arange(2), bench.known), {})
    assert scores[0].tolist() == [1, 0.5, *[1] * 8]
    assert scores[1].tolist() == [1, 1, 0.5, -0.5, *[1] * 6]


def test_penalties_in_a_mixed_batch_touch_their_own_rows_only() -> None:
    vocab = 200
    prompt = [10, 11, 10, 11, 10]
    logits = torch.randn(2, vocab, generator=torch.Generator().manual_seed(8))
    logits[:, 10] = 9.0
    plain, strict = SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, repetition_penalty=1.7)
    strictest = SamplingParams(temperature=0.0, repetition_penalty=1e-300)
    bench = Bench([(plain, prompt, []), (strict, prompt, []), (plain, prompt, []), (strictest, prompt, [])], vocab)
    assert bench.sample(logits[[0, 0, 1, 1]]).tokens.tolist()[::2] == [10, 10]
    strict_alone = int(bench.sample(logits[:1], [1]).tokens[0])
    assert bench.sample(logits[[1, 0, 0]], [2, 1, 0]).tokens.tolist() == [10, strict_alone, 10]
    assert bench.sample(logits[[0, 1]], [3, 2]).status.tolist() == [OK, OK]


def test_bias_decides_and_adds_up() -> None:
    logits = torch.zeros(50)
    assert one(SamplingParams(temperature=0.0, logit_bias=((49, 0.5), (20, 0.25), (20, 0.5))), logits) == 20
    assert one(SamplingParams(temperature=0.0, logit_bias=((0, -100.0),)), logits) == 1


def test_the_text_cannot_end_before_its_minimum() -> None:
    logits = torch.zeros(10)
    logits[[EOS, 8, 2]] = torch.tensor([5.0, 4.0, 1.0])
    params = SamplingParams(temperature=0.0, min_new_tokens=2, stop_token_ids=(8,))
    assert [one(params, logits, [1, 1], [5] * n) for n in range(4)] == [2, 2, EOS, EOS]


def test_masks_allow_nothing_else() -> None:
    vocab = 70
    words = np.zeros(3, np.int32)
    words[2] = 1 << 3  # id 67
    everything = np.full(3, -1, np.int32)
    rows = [(SamplingParams(temperature=0.0), [0], []), (SamplingParams(seed=1), [0], [])]
    logits = torch.randn(2, vocab, generator=torch.Generator().manual_seed(9))
    bench = Bench(rows, vocab)
    free = bench.sample(logits).tokens.tolist()
    assert bench.sample(logits, masks={0: words, 1: words}).tokens.tolist() == [67, 67]
    assert bench.sample(logits, masks={1: words, 0: everything}).tokens.tolist() == [free[0], 67]
    none = np.zeros(3, np.int32)
    for forbidden in ([0], [1], [0, 1]):
        sampled = bench.sample(logits, masks=dict.fromkeys(forbidden, none))
        assert sampled.status.tolist() == [NOTHING_ALLOWED if i in forbidden else OK for i in range(2)]
        assert sampled.tokens.tolist() == [0 if i in forbidden else free[i] for i in range(2)]


# ---- what no model should give


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 3e38], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_that_are_not_finite_fail_their_row_alone(poison: float, dtype: torch.dtype) -> None:
    vocab = 3000
    logits = (torch.randn(len(WISHES), vocab, generator=torch.Generator().manual_seed(10))).to(dtype)
    bench = Bench([(params, [1, 2], [3]) for params in WISHES], vocab)
    healthy = bench.sample(logits).tokens.tolist()
    for broken in range(len(WISHES)):
        bad = logits.clone()
        bad[broken, 1234] = poison
        sampled = bench.sample(bad)
        assert sampled.status.tolist() == [NOT_FINITE if i == broken else OK for i in range(len(WISHES))]
        assert sampled.tokens.tolist() == [0 if i == broken else token for i, token in enumerate(healthy)]


def test_a_row_of_minus_infinity_fails() -> None:
    bench = Bench([(SamplingParams(), [1], []), (SamplingParams(temperature=0.0), [1], [])], 10)
    assert bench.sample(torch.full((2, 10), -torch.inf)).status.tolist() == [NOT_FINITE] * 2


@pytest.mark.parametrize("params", [*WISHES, SamplingParams(temperature=100.0)], ids=str)
def test_padding_of_the_vocabulary_is_never_chosen(params: SamplingParams) -> None:
    vocab, width = 120, 192
    logits = torch.randn(64, width, generator=torch.Generator().manual_seed(11))
    logits[:, vocab:] = 50.0
    logits[::2, vocab + 3] = torch.nan  # nor does anybody look there
    rows = [(msgspec.structs.replace(params, seed=seed, logit_bias=((150, 100.0),)), [1], [2]) for seed in range(64)]
    sampled = Bench(rows, vocab).sample(logits)
    assert sampled.status.tolist() == [OK] * 64
    assert int(sampled.tokens.max()) < vocab


# ---- ranks and log-probabilities


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    vocab=st.sampled_from([5, 64, 1000, 5003]),
    k=st.integers(0, 40),
    coarse=st.booleans(),
)
def test_ranking_is_by_value_then_id(seed: int, vocab: int, k: int, coarse: bool) -> None:
    scores = torch.randn(3, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    if coarse:
        scores = scores.round()
    values, ids = rank.ranked(scores, k)
    for row in range(3):
        order = sorted(range(vocab), key=lambda i: (-float(scores[row, i]), i))[:k]
        assert ids[row].tolist() == order
        assert values[row].tolist() == [float(scores[row, i]) for i in order]
    assert torch.equal(rank.largest(scores, max(k, 1))[0], scores.sort(-1, descending=True).values[:, : max(k, 1)])


def test_log_probabilities_are_those_of_the_raw_scores() -> None:
    vocab, width = 300, 320
    logits = torch.randn(7, width, generator=torch.Generator().manual_seed(12)) * 2
    logits[:, 17] = -torch.inf
    tokens = torch.tensor([0, 17, 2, 3, 4, 5, 299])
    asked = LogprobParams(top=5, token_ids=(17, 4, 310))
    scorer = Scorer(vocab, DEVICE)
    expected = torch.log_softmax(logits[:, :vocab].double(), -1)
    scorer.part = 2  # in several parts
    scored = scorer.score(lambda a, b: logits[a:b], tokens, [asked])
    scores = take(scored.tensors(), slice(None), 40, asked)
    assert scores is not None and scores.position == 40
    assert scores.chosen.tolist() == pytest.approx(
        [max(float(row[t]), LOWEST) for row, t in zip(expected, tokens, strict=True)]
    )
    for row in range(7):
        best = expected[row].topk(5)
        assert scores.top_ids[row].tolist() == best.indices.tolist()
        assert scores.top[row].tolist() == pytest.approx(best.values.tolist())
        assert scores.picked[row].tolist() == pytest.approx([LOWEST, float(expected[row, 4]), LOWEST])
    assert scores.top_ids.dtype == np.int32 and scores.chosen.dtype == np.float32


def test_rows_get_what_they_asked_for() -> None:
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(13))
    wishes = [LogprobParams(top=0), LogprobParams(top=3), LogprobParams(top=1, token_ids=(1, 2))]
    scored = Scorer(100, DEVICE).score(lambda a, b: logits[a:b], torch.tensor([4, 5, 6]), wishes)
    shapes = []
    for i, asked in enumerate(wishes):
        scores = take(scored.tensors(), slice(i, i + 1), 0, asked)
        assert scores is not None
        shapes.append((scores.chosen.shape, scores.top_ids.shape, scores.top.shape, scores.picked.shape))
    assert shapes == [((1,), (1, 0), (1, 0), (1, 0)), ((1,), (1, 3), (1, 3), (1, 0)), ((1,), (1, 1), (1, 1), (1, 2))]


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_scores_of_broken_rows_are_not_told(poison: float) -> None:
    logits = torch.randn(2, 100, generator=torch.Generator().manual_seed(14))
    logits[1, 50] = poison
    asked = LogprobParams(top=2)
    scored = Scorer(100, DEVICE).score(lambda a, b: logits[a:b], torch.tensor([4, 5]), [asked]).tensors()
    assert take(scored, slice(0, 1), 0, asked) is not None
    assert take(scored, slice(1, 2), 0, asked) is None
