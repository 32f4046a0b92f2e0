"""Deterministic mode on a GPU: to the last bit, a token's result depends on its own sequence alone."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

import radixlm
from radixlm.attention.base import LayerSpec
from radixlm.attention.torch_ref import TorchReference
from support import tiny
from support.attention import attended, make_step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (6144, 4096), (1000, 1160), (49152, 576)])
def test_products_have_one_order_of_sums(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    from radixlm.ops.triton_fixed import product

    x = torch.randn(300, inputs, device="cuda", dtype=dtype)
    weight = torch.randn(outputs, inputs, device="cuda", dtype=dtype) * inputs**-0.5
    bias = torch.randn(outputs, device="cuda", dtype=dtype)
    together = product(x, weight, bias)
    expected = x.float() @ weight.float().T + bias.float()
    bound = 1e-5 if dtype == torch.float32 else 5e-3
    assert (together.float() - expected).norm() / expected.norm() < bound
    for few in (slice(7, 8), slice(0, 3), slice(100, 164), slice(3, 299)):
        assert torch.equal(product(x[few], weight, bias), together[few])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("heads", [(8, 2, 128), (4, 4, 64)])
def test_a_token_gets_the_same_in_any_chunk(dtype: torch.dtype, heads: tuple[int, int, int]) -> None:
    """The last token of a sequence: as the end of a prompt, of a chunk, and decoded, alone and beside others."""
    from radixlm.attention.fixed import FixedAttention
    from radixlm.memory.pool import KVPool

    device = torch.device("cuda")
    spec = LayerSpec(heads[0], heads[1], heads[2], heads[2] ** -0.5)
    length = 333
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(length, count, spec.head_dim, generator=generator).to(device, dtype)
        for count in (spec.heads, spec.kv_heads, spec.kv_heads)
    )
    results = []
    for start in (0, 100, 256, length - 1):
        for others in ((), ((50, 1), (0, 70))):
            first = [(length - 1, 1)] if start == length - 1 else []
            spans = [*first, *others, *([] if first else [(start, length - start)])]
            at = 0 if first else sum(n for _, n in others)
            inputs, pages = make_step(spans, 1, device)
            pool = KVPool([(spec.kv_heads, spec.head_dim)], pages, 1, dtype, device)
            pool.heads[0].zero_()
            row = inputs.rows[0 if first else -1]
            before = inputs.page_table[row, :start].long()
            pool.write(0, before, k[:start], v[:start])
            noise = [
                torch.randn(len(inputs.slots), n, spec.head_dim).to(device, dtype)
                for n in (heads[0], heads[1], heads[1])
            ]
            for mine, theirs in zip((q, k, v), noise, strict=True):
                theirs[at : at + length - start] = mine[start:]
            backend = FixedAttention()
            out = backend.run(backend.plan(inputs, pool), 0, spec, pool, *noise)
            results.append(out[at + length - start - 1])
    for other in results[1:]:
        assert torch.equal(results[0], other)


def test_it_is_attention() -> None:
    from radixlm.attention.fixed import FixedAttention

    spec = LayerSpec(8, 2, 64, 0.125, window=96)
    for spans in ([(300, 1), (17, 1), (0, 1)], [(100, 1), (0, 90), (37, 130)]):
        inputs, pages = make_step(spans, 16, torch.device("cuda"))
        got = attended(FixedAttention(), inputs, pages, spec, torch.float32)
        expected = attended(TorchReference(), inputs, pages, spec, torch.float32)
        assert (got - expected).norm() / expected.norm() < 1e-5


def words(directory: Path) -> None:
    """A word for each id: the engine makes text of them, which nobody reads here."""
    model = {"type": "WordLevel", "vocab": {f"w{i}": i for i in range(2000)}, "unk_token": "w0"}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))


def test_an_engine_says_the_same_alone_in_a_batch_cold_and_warm(tmp_path: Path) -> None:
    """Random bfloat16 weights: near-ties are everywhere, so any difference in a sum shows within a few tokens."""
    shape = tiny.config(vocab_size=2000, hidden_size=256, num_attention_heads=8, num_key_value_heads=2, head_dim=64)
    path = tiny.write(tmp_path / "model", shape, tiny.random_weights(shape), tokenizer=words)
    rng = random.Random(5)
    prompts = [[rng.randrange(3, 2000) for _ in range(rng.choice((5, 90, 300, 700)))] for _ in range(40)]
    params = {"temperature": 0.0, "max_new_tokens": 48, "ignore_eos": True}
    options = {
        "model": str(path),
        "device": "cuda",
        "dtype": "bfloat16",
        "deterministic": True,
        "max_total_tokens": 60_000,
    }
    with radixlm.Engine(**options) as engine:
        together = [answer["output_ids"] for answer in engine.generate(input_ids=prompts, sampling_params=params)]
        warm = [answer["output_ids"] for answer in engine.generate(input_ids=prompts, sampling_params=params)]
        alone = [engine.generate(input_ids=prompt, sampling_params=params)["output_ids"] for prompt in prompts[:8]]
        engine.flush_cache()
        cold = [engine.generate(input_ids=prompt, sampling_params=params)["output_ids"] for prompt in prompts[:8]]
    assert warm == together
    assert alone == together[:8] and cold == together[:8]
    with radixlm.Engine(**options, disable_cuda_graph=True, chunked_prefill_size=64, page_size=16) as engine:
        other = [answer["output_ids"] for answer in engine.generate(input_ids=prompts, sampling_params=params)]
    assert other == together
