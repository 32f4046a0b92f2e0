"""LOADM, GGUF, SEC-2 and part of TKN-1: checkpoints of every spelling, damaged and hostile ones, loaded whole.

Single parts of it have tests of their own: tests/unit/test_gguf.py (headers), tests/unit/test_checkpoint_*.py (files,
spellings of rope, conversion), tests/numerics/test_load.py (tensors).
"""

from __future__ import annotations

import inspect
import json
import pickle
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, DynamicCache

from radixlm import Engine
from radixlm.base.errors import StartupError
from support import tiny
from support.gguf_file import header, pair, scored_tokenizer, tensor, text, write_model
from support.live import environment
from support.tiny import Array, Json, Weights
from support.vocab import byte_level

VOCAB = byte_level().backend.get_vocab_size()
EOS = byte_level().eos

#: A prompt that is longer than some of the models were made for.
LONG = [(7 * i) % (VOCAB - 10) for i in range(200)]


def shape(**changes: Any) -> Json:
    return tiny.config(**{"vocab_size": VOCAB, "bos_token_id": EOS, "eos_token_id": EOS, **changes})


def small_tokenizer(path: Path) -> None:
    byte_level().backend.save(str(path / "tokenizer.json"))


def directory(path: Path, config: Json, weights: Mapping[str, Array] | None) -> Path:
    return tiny.write(path, config, weights, tokenizer=small_tokenizer)


def engine(model: Path, **options: Any) -> Engine:
    sizes = {"threads": 1, "max_total_tokens": 4096, "dtype": "float32"}
    return Engine(model=str(model), device="cpu", **{**sizes, **options})


def greedy(model: Path, prompt: list[int] | None = None) -> list[int]:
    """The ids that a model says after a short prompt."""
    with engine(model) as made:
        sampling = {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}
        found: list[int] = made.generate(input_ids=prompt or LONG[:20], sampling_params=sampling)["output_ids"]
        return found


def scores(model: Path, prompt: list[int]) -> list[float]:
    """The log-probability of every token of a prompt but the first."""
    with engine(model) as made:
        answer = made.generate(
            input_ids=prompt, sampling_params={"max_new_tokens": 1}, return_logprob=True, logprob_start_len=0
        )
    return [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]


def reference(model: Path, prompt: list[int], *, stepwise: bool = False) -> list[float]:
    """The same by transformers, at once or token by token."""
    judge = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        if stepwise:
            # The name of the argument depends on the version.
            name = "cache" if "cache" in inspect.signature(judge.forward).parameters else "past_key_values"
            kept = {name: DynamicCache(config=judge.config)}
            logits = torch.stack([judge(token[None, None], **kept).logits[0, 0] for token in ids[0]])
        else:
            logits = judge(ids).logits[0]
    found = torch.log_softmax(logits[:-1], -1).gather(1, ids[0, 1:, None])[:, 0]
    return [float(value) for value in found]


@pytest.fixture(scope="module")
def weights() -> Weights:
    """Of an untied model."""
    return tiny.random_weights(shape(), seed=5)


# ---- LOADM


def test_loadm_1_tied_embeddings(tmp_path: Path, weights: Weights) -> None:
    tied = {name: array for name, array in weights.items() if name != "lm_head.weight"}
    both = {**tied, "lm_head.weight": tied["model.embed_tokens.weight"].copy()}
    without = directory(tmp_path / "without", shape(tie_word_embeddings=True), tied)
    said = greedy(without)
    assert greedy(directory(tmp_path / "with", shape(tie_word_embeddings=True), both)) == said
    assert greedy(directory(tmp_path / "untied", shape(), weights)) != said
    assert scores(without, LONG[:50]) == pytest.approx(reference(without, LONG[:50]), abs=1e-3)
    with pytest.raises(StartupError, match=r"lm_head\.weight"):
        engine(directory(tmp_path / "lost", shape(), tied))


def test_loadm_2_shards(tmp_path: Path, weights: Weights) -> None:
    said = greedy(directory(tmp_path / "whole", shape(), weights))
    names = sorted(weights)
    path = directory(tmp_path / "shards", shape(), None)
    index: dict[str, str] = {}
    for i in range(3):
        file = f"model-{i + 1:05}-of-00003.safetensors"
        save_file({name: weights[name] for name in names[i::3]}, path / file)
        index |= dict.fromkeys(names[i::3], file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert greedy(path) == said
    save_file({"stray": np.ones(3, np.float32), names[0]: weights[names[0]] * 2}, path / "model-extra.safetensors")
    assert greedy(path) == said
    (path / "model-00002-of-00003.safetensors").unlink()
    status, error = serve(path, tmp_path)
    assert status == 2 and "model-00002-of-00003.safetensors" in error


ROPES: Mapping[str, Any] = {
    "null": None,
    "linear, the old spelling": {"type": "linear", "factor": 2.0},
    "linear, the new spelling": {"rope_type": "linear", "factor": 2},
    "llama3": {
        "rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128},
    "yarn, its length not said": {"rope_type": "yarn", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "dynamic, the old spelling": {"type": "dynamic", "factor": 2.0},
}  # fmt: skip


@pytest.mark.parametrize("name", ROPES)
def test_loadm_3_rope_spellings(name: str, tmp_path: Path, weights: Weights) -> None:
    """Scores of 200 tokens by a model made for 128, where the scaling stretches it."""
    stretched = ROPES[name] is not None and not name.startswith("llama3")
    length = 128 if stretched else 256
    config = {**shape(max_position_embeddings=length), "rope_scaling": ROPES[name]}
    path = directory(tmp_path / "m", config, weights)
    with engine(path) as made:
        assert made.facts.model.context_length == 256
    # Dynamic scaling depends on the length so far; a server sees a text token by token.
    expected = reference(path, LONG, stepwise=name.startswith("dynamic"))
    assert scores(path, LONG) == pytest.approx(expected, abs=1e-3)


def test_loadm_3_both_spellings_of_linear_are_one(tmp_path: Path, weights: Weights) -> None:
    found = []
    for i, name in enumerate(("linear, the old spelling", "linear, the new spelling")):
        config = shape(max_position_embeddings=128, rope_scaling=ROPES[name])
        found.append(scores(directory(tmp_path / str(i), config, weights), LONG))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "field",
    ["num_key_value_heads", "head_dim", "rope_theta", "torch_dtype", "tie_word_embeddings", "bos_token_id",
     "max_position_embeddings", "rms_norm_eps", "hidden_act"],
)  # fmt: skip
def test_loadm_4_missing_fields_have_defaults(field: str, tmp_path: Path) -> None:
    config = shape(num_key_value_heads=4, rms_norm_eps=1e-6)
    weights = tiny.random_weights(config, seed=6)
    said = greedy(directory(tmp_path / "all", config, weights))
    assert greedy(directory(tmp_path / "less", {k: v for k, v in config.items() if k != field}, weights)) == said


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_loadm_4_fields_without_a_default_are_named(field: str, tmp_path: Path, weights: Weights) -> None:
    config = {name: value for name, value in shape().items() if name != field}
    status, error = serve(directory(tmp_path / "m", config, weights), tmp_path)
    assert status == 2 and field in error


def test_loadm_an_unknown_architecture_is_told_what_is_known(tmp_path: Path, weights: Weights) -> None:
    config = shape(architectures=["NoSuchModelForCausalLM"], model_type="nosuch")
    status, error = serve(directory(tmp_path / "m", config, weights), tmp_path)
    assert status == 2 and "NoSuchModelForCausalLM" in error and "LlamaForCausalLM" in error


def test_tkn_1_exactly_one_start_token(tmp_path: Path, weights: Weights) -> None:
    """A tokenizer that adds the start token, and a template that writes it: neither doubles the other's."""
    start = byte_level().backend.token_to_id("<|user|>")

    def adding(path: Path) -> None:
        backend = Tokenizer.from_str(byte_level().backend.to_str())
        backend.post_processor = TemplateProcessing(single="<|user|> $A", special_tokens=[("<|user|>", start)])
        backend.save(str(path / "tokenizer.json"))
        template = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        names = {"bos_token": "<|user|>", "chat_template": template}
        (path / "tokenizer_config.json").write_text(json.dumps(names))

    path = tiny.write(tmp_path / "m", shape(bos_token_id=start), weights, tokenizer=adding)
    sampling = {"max_new_tokens": 1, "temperature": 0}
    with engine(path) as made:
        messages = [{"role": "user", "content": "Hi"}]
        chat = made.render(messages)
        assert chat[0] == start and chat.count(start) == 1
        assert made.chat(messages, sampling)["meta_info"]["prompt_tokens"] == len(chat)
        text = made.encode("Hi")
        assert text[0] == start and text.count(start) == 1
        assert made.generate("Hi", sampling)["meta_info"]["prompt_tokens"] == len(text)
        # An empty text is the start token alone, and may be continued. Ids are taken as they are.
        assert made.generate("", sampling)["meta_info"]["prompt_tokens"] == 1
        assert (
            made.generate(input_ids=text[1:], sampling_params=sampling)["meta_info"]["prompt_tokens"] == len(text) - 1
        )


# ---- GGUF


def interleaved(rows: Array, heads: int) -> Array:
    """Rows of q and k as GGUF stores them: those of the two rotary halves take turns."""
    half = len(rows) // heads // 2
    return rows.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(rows.shape).copy()


def gguf_twin(path: Path, config: Json, weights: Weights, tokenizer: Mapping[str, Any]) -> Path:
    """The same model as one GGUF file. `tokenizer` goes under `tokenizer.ggml`."""
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    parts = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    for layer in range(config["num_hidden_layers"]):
        names |= {f"model.layers.{layer}.{ours}": f"blk.{layer}.{theirs}" for ours, theirs in parts.items()}
    stored = {f"{names[name.removesuffix('.weight')]}.weight": array for name, array in weights.items()}
    for name, array in stored.items():
        if name.endswith("attn_q.weight"):
            stored[name] = interleaved(array, config["num_attention_heads"])
        if name.endswith("attn_k.weight"):
            stored[name] = interleaved(array, config["num_key_value_heads"])
    numbers = {
        "embedding_length": config["hidden_size"], "feed_forward_length": config["intermediate_size"],
        "block_count": config["num_hidden_layers"], "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"], "context_length": config["max_position_embeddings"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"], "rope.freq_base": config["rope_theta"],
        "rope.dimension_count": config["head_dim"], "vocab_size": config["vocab_size"],
    }  # fmt: skip
    return write_model(path, "llama", stored, numbers, tokenizer)


def gguf_tokenizer() -> Json:
    """The small tokenizer as GGUF has it."""
    backend = byte_level().backend
    added = backend.get_added_tokens_decoder()
    merges = json.loads(backend.to_str())["model"]["merges"]
    return {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [backend.id_to_token(i) for i in range(VOCAB)],
        "token_type": [(3 if added[i].special else 4) if i in added else 1 for i in range(VOCAB)],
        "merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
        "bos_token_id": EOS,
        "eos_token_id": EOS,
        "tokenizer.chat_template": TEMPLATE,
    }


TEMPLATE = "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"


def test_gguf_1_same_tokens_and_answers_as_the_original(
    tmp_path: Path, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RADIXLM_CACHE", str(tmp_path / "cache"))
    original = directory(tmp_path / "original", shape(), weights)
    names = {"eos_token": "<|end|>", "bos_token": "<|end|>", "chat_template": TEMPLATE}
    (original / "tokenizer_config.json").write_text(json.dumps(names))
    twin = gguf_twin(tmp_path / "twin.gguf", shape(), weights, gguf_tokenizer())
    texts = ("Grüße aus Wien! 42 — こんにちは 🙂  two", " a", "\n a", "é", "<|end|>x", "a\tb  c", "čtyřlístek 漢 字é")
    chat = [{"role": "user", "content": "Grüße <|user|> 42"}, {"role": "user", "content": "two  spaces"}]
    found = []
    for path in (original, twin):
        with engine(path) as made:
            sampling = {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}
            said = made.generate(input_ids=LONG[:20], sampling_params=sampling)["output_ids"]
            rendered = made.render(chat)
            assert rendered.count(made.encode("<|user|>")[0]) == 2 and rendered.count(EOS) == 2
            assert [made.decode(made.encode(t), skip_special_tokens=False) for t in texts] == list(texts)
            found.append(([made.encode(t) for t in texts], rendered, said, made.facts.model.eos_ids))
    assert found[0] == found[1]


HOSTILE = {
    "a dimension 0": header([], [tensor("t", [0])]),
    "dims 2**62 x 4": header([], [tensor("t", [2**62] * 4)]),
    "n_dims 1000000": header([], [tensor("t", [1], rank=1_000_000)]),
    "a string of length 2**30": header([pair("k", 8, struct.pack("<Q", 2**30))]),
    "general.alignment 2**30": header([pair("general.alignment", 4, struct.pack("<I", 2**30))]),
    "an empty key name": header([pair("", 4, struct.pack("<I", 1))]),
    "an array of 2**40 items": header([pair("k", 9, struct.pack("<IQ", 4, 2**40))]),
    "a model without tensors": header([pair("general.architecture", 8, text("llama"))]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_gguf_2_hostile_headers(name: str, tmp_path: Path) -> None:
    """By the command itself: one line, soon, with little memory, and no signal."""
    file = tmp_path / "bad.gguf"
    file.write_bytes(HOSTILE[name])
    begin = time.monotonic()
    status, error = serve(file, tmp_path, most_memory=300 << 20)
    assert time.monotonic() - begin < 5
    assert status == 2 and str(file) in error


def test_gguf_3_byte_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXLM_CACHE", str(tmp_path / "cache"))
    odd = ["<0x-1>", "<0xZZ>"]
    tokenizer = scored_tokenizer(odd)
    config = shape(vocab_size=len(tokenizer["tokens"]), tie_word_embeddings=True)
    weights = tiny.random_weights(config)
    file = gguf_twin(tmp_path / "odd.gguf", config, weights, tokenizer)
    with engine(file) as made:
        for said in (" a", "a", "\n a", "é", "", "ab a 🙂 漢字"):
            assert made.decode(made.encode(said, add_special_tokens=False)) == said
        numbers = [tokenizer["tokens"].index(word) for word in odd]
        assert made.decode(numbers) == "".join(odd)
        sampling = {"max_new_tokens": 4, "temperature": 0, "logit_bias": {str(numbers[0]): 100}}
        assert made.generate(input_ids=[5], sampling_params=sampling)["text"] == odd[0] * 4


# ---- SEC-2


class Trap:
    """Unpickling it makes a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> Any:
        return open, (str(self._file), "w")


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.bin", "pytorch_model-00001-of-00001.bin", "consolidated.pth"]
)
def test_sec_2_pickled_weights_do_not_run(name: str, tmp_path: Path, weights: Weights) -> None:
    pwned = tmp_path / "pwned"
    with_safetensors = directory(tmp_path / "with", shape(), weights)
    without = directory(tmp_path / "without", shape(), None)
    for path in (with_safetensors, without):
        (path / name).write_bytes(pickle.dumps(Trap(pwned)))
    assert greedy(with_safetensors)
    with pytest.raises(StartupError, match="pickle") as refused:
        engine(without)
    assert name in refused.value.message
    assert not pwned.exists()
    pickle.loads((without / name).read_bytes()).close()
    assert pwned.exists(), "the trap does not work"


#: Runs a command and prints its status and the most memory that it or a child of its held, in KiB. In a process of its
#: own: what a large process starts counts as large from the beginning.
MEASURE = """
import resource, subprocess, sys
status = subprocess.run(sys.argv[1:]).returncode
print(status, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def serve(model: Path, scratch: Path, most_memory: int = 0) -> tuple[int, str]:
    """Exit status and error line of a server that cannot start. That line is the last one, and nothing is left."""
    command = [sys.executable, "-m", "radixlm", "serve", str(model), "--port", "0", "--threads", "1"]
    place = scratch / "s"
    place.mkdir()
    measured = [sys.executable, "-c", MEASURE, *command]
    done = subprocess.run(measured, env=environment(place), capture_output=True, text=True, timeout=60)
    status, kilobytes = map(int, done.stdout.split())
    assert "Traceback" not in done.stderr, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("radixlm: error: ")]
    assert done.stderr.splitlines()[-1] == line
    if most_memory:
        assert kilobytes * 1024 < most_memory
    assert not list(place.iterdir())
    return status, line


@pytest.fixture(autouse=True)
def _quiet_transformers() -> Iterator[None]:
    import transformers

    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    yield
    transformers.logging.set_verbosity(before)
