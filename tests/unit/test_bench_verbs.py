"""`radixlm bench offline` and `one-batch` as typed: on the null device, and on a small model with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from radixlm.bench import floors
from radixlm.cli.main import main as radixlm
from support.tiny import config
from support.vocab import byte_level

Json = dict[str, Any]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "tiny"
    directory.mkdir()
    vocab = byte_level().backend
    shape = config(vocab_size=vocab.get_vocab_size(), max_position_embeddings=512, eos_token_id=0, bos_token_id=None)
    (directory / "config.json").write_text(json.dumps(shape))
    vocab.save(str(directory / "tokenizer.json"))
    return directory


def bench(kind: str, model: Path, *argv: str) -> Json:
    """The saved result of a benchmark."""
    path = model.parent / "result.json"
    assert radixlm(["bench", kind, str(model), "--save-result", str(path), *argv]) == 0
    loaded: Json = json.loads(path.read_text())
    return loaded


def test_offline_with_and_without_the_radix_cache(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--dataset-name", "shared-prefix", "--num-prompts", "12", "--num-groups", "3", "--shared-len", "50",
            "--own-len", "10", "--output-len", "4", "--repeats", "2", "--seed", "9")  # fmt: skip
    result = bench("offline", model, "--device", "null", "--compare-radix", *argv)
    with_cache, without = result["passes"]["radix cache"], result["passes"]["without radix cache"]
    assert len(with_cache) == len(without) == 2
    for one in (*with_cache, *without):
        assert (one["requests"], one["input_tokens"], one["output_tokens"]) == (12, 12 * 60, 12 * 4)
    assert all(one["cached_tokens"] >= 9 * 50 for one in with_cache)  # all but the first of each group
    assert all(one["cached_tokens"] == 0 for one in without)
    assert result["seed"] == 9 and "the model's tokenizer" in result["dataset"]["source"]
    assert result["command"].startswith(f"radixlm bench offline {model}")
    out = capsys.readouterr().out
    assert "without / with" in out and "cached input" in out


def test_offline_conversations_reuse_their_history(model: Path) -> None:
    argv = ("--dataset-name", "multi-turn", "--num-prompts", "3", "--num-turns", "3", "--input-len", "20")
    result = bench("offline", model, "--device", "null", "--output-len", "5", "--repeats", "1", *argv)
    (one,) = result["passes"]["radix cache"]
    assert one["input_tokens"] == 3 * (20 + 45 + 70)
    # at least the prompt of the turn before: its answer may still be on its way into the tree when the next turn comes
    assert one["cached_tokens"] >= 3 * (20 + 45)


def test_one_batch_on_the_null_device(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--batch-size", "1", "4", "--input-len", "30", "--output-len", "6", "--repeats", "2")
    result = bench("one-batch", model, "--device", "null", *argv)
    assert [batch["shape"]["batch"] for batch in result["batches"]] == [1, 4]
    assert all(batch["prefill"]["count"] == 2 and batch["decode"]["count"] == 10 for batch in result["batches"])
    out = capsys.readouterr().out
    assert "1 x 30 + 6" in out and "4 x 30 + 6" in out


def test_one_batch_on_a_model_beside_its_floors(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floors, "SECONDS", 0.01)
    monkeypatch.setattr(floors, "SIDE", 128)
    argv = ("--load-format", "dummy", "--device", "cpu", "--dtype", "float32", "--max-total-tokens", "2048")
    result = bench("one-batch", model, "--floors", "--batch-size", "3", "--input-len", "40", "--repeats", "1", *argv)
    (batch,) = result["batches"]
    assert batch["prefill"]["count"] == 1 and batch["decode"]["count"] == 31
    # a decode step reads all weights; how near to its floor it comes depends on who else computes here
    weights = result["engine"]["model"]["weight_bytes"]
    assert batch["decode_floor"] >= weights / result["ceilings"]["bandwidth"] > 0
    assert batch["prefill_floor"] > 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["one-batch", "--device", "null", "--floors"], "the null device has no ceilings"),
        (["one-batch", "--device", "null", "--input-len", "600"], "more than the context of 512"),
        (["one-batch", "--device", "null", "--repeats", "0"], "--repeats is 0"),
        (["offline", "--device", "null", "--repeats", "0"], "--repeats is 0"),
        (["offline", "--device", "null", "--own-len", "0"], "--own-len is 0"),
        (["offline", "--device", "null", "--save-result", "/nowhere/x"], "no file can be written"),
    ],
)
def test_bad_input_is_one_line(model: Path, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert radixlm(["bench", *argv, "--model", str(model)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and not captured.out
