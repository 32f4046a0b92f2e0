"""Vectors of texts against transformers: encoders of BERT's shape; decoders pooled whole, in chunks, from a cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, RobertaConfig, RobertaModel

from radixlm.base.errors import BadRequest, StartupError
from radixlm.base.plan import Join, Plan
from radixlm.base.sampling import SamplingParams
from radixlm.checkpoint.directory import read_directory
from radixlm.llm import Engine
from radixlm.models import table
from radixlm.models.bert import Packing
from radixlm.models.load import open_weights
from radixlm.runner.pooling import Pooler
from support.models import packaged
from support.vocab import byte_level

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers says of tiny models

VOCAB, CPU = 420, torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "max_position_embeddings": 130, "initializer_range": 0.3,
}  # fmt: skip
TEXTS = ["one", "one two three", "a much longer text than the others, with an end", "x"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def encoder(path: Path, kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "bert":
        model: Any = BertModel(BertConfig(**SIZES)).eval()
    else:
        model = RobertaModel(RobertaConfig(**SIZES, pad_token_id=1, type_vocab_size=1)).eval()
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_encoders_equal_transformers(kind: str, tmp_path: Path) -> None:
    reference = encoder(tmp_path, kind)
    checkpoint = read_directory(tmp_path, "tiny")
    assert table.is_encoder(checkpoint.config)
    family = table.find_encoder(checkpoint.config)
    ours = family.build(checkpoint.config, open_weights(checkpoint, "auto", 0), torch.float32, CPU)
    assert family.context_length(checkpoint.config) == (130 if kind == "bert" else 128)
    lengths = [5, 1, 17, family.context_length(checkpoint.config), 5]
    texts = [torch.randint(2, VOCAB, (length,)) for length in lengths]
    with torch.inference_mode():
        states = ours.forward(torch.cat(texts), lengths).split(lengths)
        for text, found in zip(texts, states, strict=True):
            wanted = reference(text[None]).last_hidden_state[0]
            torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)


def test_relative_positions_are_refused(tmp_path: Path) -> None:
    encoder(tmp_path, "bert")
    checkpoint = read_directory(tmp_path, "tiny")
    config = {**checkpoint.config, "position_embedding_type": "relative_key"}
    with pytest.raises(StartupError, match="relative_key"):
        table.find_encoder(config).build(config, open_weights(checkpoint, "auto", 0), torch.float32, CPU)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_padding_is_undone(lengths: list[int]) -> None:
    flat = torch.arange(sum(lengths) * 6, dtype=torch.float32).view(-1, 2, 3)
    packing = Packing(lengths, CPU)
    padded = packing.pad(flat)
    assert padded.shape == (len(lengths), 2, max(lengths), 3)
    assert torch.equal(packing.flatten(padded), flat.flatten(1))
    assert (packing.mask is None) == (len(set(lengths)) == 1)


# ---- decoders


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_parts_of_spans_join_to_the_vector(data: st.DataObject) -> None:
    """However prompts are cut into spans, and whoever else is in the steps."""
    pooler = Pooler()
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    kinds = [data.draw(st.sampled_from(["last", "first", "mean", None])) for _ in lengths]
    states = [torch.tensor(rng.standard_normal((n, 5)), dtype=torch.float32) for n in lengths]
    for row, (length, kind) in enumerate(zip(lengths, kinds, strict=True)):
        pooler.join(
            Join(row, row, np.zeros(length, np.int32), np.zeros(0, np.int32), length, SamplingParams(), None, kind)
        )
    done = [0] * len(lengths)
    sums: dict[int, torch.Tensor] = {}
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        rows = [row for row, length in enumerate(lengths) if done[row] < length]
        cuts = [data.draw(st.integers(1, lengths[row] - done[row])) for row in rows]
        plan = Plan(
            0, np.array(rows, np.int32), np.array([done[row] for row in rows], np.int32), np.array(cuts, np.int32),
            np.zeros(len(rows), np.bool_),
        )  # fmt: skip
        hidden = torch.cat([states[row][done[row] : done[row] + cut] for row, cut in zip(rows, cuts, strict=True)])
        pooled = pooler.pool(plan, hidden)
        for span, part in zip(*pooled, strict=True) if pooled else ():
            row = rows[span]
            sums[row] = sums[row] + part if row in sums else part
        for row, cut in zip(rows, cuts, strict=True):
            done[row] += cut
    assert sums.keys() == {row for row, kind in enumerate(kinds) if kind is not None}
    for row, found in sums.items():
        wanted = {"last": states[row][-1], "first": states[row][0], "mean": states[row].sum(0)}[str(kinds[row])]
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    path = tmp_path_factory.mktemp("decoder")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, eos_token_id=7, bos_token_id=1, initializer_range=0.3,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(path)
    byte_level().backend.save(str(path / "tokenizer.json"))
    return path, model


def wanted(model: LlamaForCausalLM, ids: list[int], pooling: str) -> np.ndarray:
    with torch.inference_mode():
        states = model.model(torch.tensor([ids])).last_hidden_state[0].numpy()
    vector = {"last": states[-1], "first": states[0], "mean": states.mean(0)}[pooling]
    return np.asarray(vector / np.linalg.norm(vector))


def test_decoders_equal_transformers(decoder: tuple[Path, LlamaForCausalLM]) -> None:
    """Whole, in chunks of 7, from a cached prefix, beside requests that generate, and when memory is short."""
    path, model = decoder
    rng = np.random.default_rng(3)
    stem = rng.integers(8, VOCAB, 40).tolist()
    prompts = [stem + rng.integers(8, VOCAB, n).tolist() for n in (1, 5, 60)] + [stem[:20], [9]]
    for options in ({}, {"chunked_prefill_size": 7, "page_size": 4}, {"disable_radix_cache": True}):
        with Engine(
            model=str(path), dtype="float32", device="cpu", max_total_tokens=512, threads=1, **options
        ) as engine:
            assert engine.facts.model.pooling == "last" and engine.facts.model.generates
            for pooling in ("last", "first", "mean"):
                answers = engine.embed(input_ids=prompts, pooling=pooling)
                for ids, answer in zip(prompts, answers, strict=True):
                    np.testing.assert_allclose(answer["embedding"], wanted(model, ids, pooling), atol=2e-5)
                engine.generate(input_ids=prompts, sampling_params={"max_new_tokens": 3, "temperature": 0})
            if not options.get("disable_radix_cache"):
                (again,) = engine.embed(input_ids=prompts[2:3])
                assert again["meta_info"]["cached_tokens"] >= 96
            engine.audit()


# ---- the real model


def test_the_real_encoder() -> None:
    directory = packaged("all-minilm-l6-v2").directory
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(directory), AutoModel.from_pretrained(directory).eval()
    texts = ["A man is eating food.", "A man is eating a piece of bread.", "The stock market fell today. " * 20]
    with torch.inference_mode():
        wanted = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0).numpy() for text in texts]
    with Engine(model=str(directory), threads=1, chunked_prefill_size=16) as engine:
        assert engine.facts.model.pooling == "mean" and not engine.facts.model.generates
        answers = engine.embed(texts)
        found = [np.array(answer["embedding"]) for answer in answers]
        for vector, reference in zip(found, wanted, strict=True):
            np.testing.assert_allclose(vector, reference / np.linalg.norm(reference), atol=1e-5)
        assert found[0] @ found[1] > 0.7 and abs(found[0] @ found[2]) < 0.2
        with pytest.raises(BadRequest, match="embeddings"):
            engine.generate("A man is")
        assert engine.embed("short")["meta_info"]["prompt_tokens"] == 3
