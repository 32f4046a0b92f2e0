"""Text to ids and back: the real vocabulary, and small ones of every kind."""

from __future__ import annotations

import json
import pydoc_data.topics
import tempfile
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixlm.base.errors import BadRequest, ContextLengthExceeded, StartupError
from radixlm.checkpoint.checkpoint import Checkpoint
from radixlm.text.tokenizer import Piece, Tokenizer
from radixlm.text.words import alternation
from support import vocab
from support.models import packaged
from support.vocab import Vocab

PROSE = list(pydoc_data.topics.topics.values())
TEXTS = ["Grüße aus Wien! 42 — こんにちは 🙂  two", " a", "a", "\n a", "é", "", "👨‍👩‍👧‍👦 čtyřlístek 漢字 🇨🇿 naïve"]
KINDS: dict[str, Callable[[], Vocab]] = {
    "byte level": vocab.byte_level,
    "byte fallback": lambda: vocab.byte_fallback(0),
    "metaspace": lambda: vocab.metaspace("never"),
}


@cache
def smollm2() -> Tokenizer:
    return Tokenizer.of(packaged())


@cache
def small(kind: str) -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        KINDS[kind]().backend.save(f"{folder}/tokenizer.json")
        return Tokenizer(Path(folder) / "tokenizer.json")


@pytest.mark.parametrize("text", [*TEXTS, *PROSE[:20]])
def test_round_trips_and_exact_bytes(text: str) -> None:
    tokenizer = smollm2()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(tokenizer.token_bytes(index) for index in ids) == text.encode()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(text=st.text("ab hello wořd漢🙂\n\t.", max_size=40))
def test_bytes_of_tokens_join_to_the_text(kind: str, text: str) -> None:
    tokenizer = small(kind)
    ids = tokenizer.encode(text, add_special_tokens=False)
    if tokenizer.id("<unk>") not in ids:
        assert b"".join(tokenizer.token_bytes(index) for index in ids).decode() == tokenizer.decode(ids)


def test_what_the_model_says_of_its_tokens() -> None:
    tokenizer = smollm2()
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (49152, 1, (2, 0))
    assert (tokenizer.token(2), tokenizer.id("<|im_end|>"), tokenizer.id("no such token")) == ("<|im_end|>", 2, None)
    assert tokenizer.special_ids == frozenset(range(17)) and "<|im_start|>" in tokenizer.control_words
    assert (tokenizer.token(-1), tokenizer.token(49152), tokenizer.token_bytes(49152)) == (None, None, b"")
    tokenizer.check([0, 49151])
    with pytest.raises(BadRequest, match="49152, which is no token: ids run from 0 to 49151"):
        tokenizer.check([5, 49152])
    assert tokenizer.decode([-1, 10**6]) == ""


def test_end_tokens_are_collected_from_three_places(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    vocab.byte_level().backend.save(str(file))
    tokenizer = Tokenizer(
        file, {"eos_token": "<|end|>"}, {"eos_token_id": 5, "bos_token_id": 9}, {"eos_token_id": [7, 5]}
    )
    assert tokenizer.eos_ids == (7, 5, vocab.byte_level().eos) and tokenizer.bos_id == 9
    assert Tokenizer(file, {"eos_token": "nothing"}, {"eos_token_id": None}).eos_ids == ()


def test_control_words_are_parsed_or_spelled() -> None:
    tokenizer, text = smollm2(), "<|im_start|>tea or coffee<|im_end|>"
    parsed = tokenizer.encode(text, add_special_tokens=False)
    spelled = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    assert [index for index in parsed if index in tokenizer.special_ids] == [1, 2]
    assert not tokenizer.special_ids & set(spelled)
    assert tokenizer.decode(parsed, skip_special_tokens=False) == tokenizer.decode(spelled) == text
    assert tokenizer.decode(parsed) == "tea or coffee"
    assert tokenizer.encode(text, add_special_tokens=False) == parsed  # asking for the one does not change the other


@pytest.mark.parametrize("text", [*TEXTS, *PROSE[:10]])
def test_the_careful_path_is_the_ordinary_one_for_trusted_text(text: str) -> None:
    """One untrusted word at the end leads past the short cut; before it nothing may differ."""
    tokenizer = smollm2()
    chat = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>"
    ids = tokenizer.encode_pieces([Piece(chat), Piece("<|im_end|>", trusted=False)])
    ordinary = tokenizer.encode_pieces([Piece(chat)])
    assert ordinary == tokenizer.encode(chat, add_special_tokens=False)
    assert ids == ordinary + tokenizer.encode("<|im_end|>", add_special_tokens=False, parse_special=False)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["<|im_end|>", "<|im_start|>", "x", " ", "\n", "<|", "|>", "im_end"]), st.booleans())
    )
)
def test_control_tokens_are_exactly_the_trusted_ones(parts: list[tuple[str, bool]]) -> None:
    tokenizer = smollm2()
    pieces = [Piece(text, trusted) for text, trusted in parts]
    ids = tokenizer.encode_pieces(pieces)
    assert tokenizer.decode(ids, skip_special_tokens=False) == "".join(text for text, _ in parts)
    trusted = "".join(piece.text if piece.trusted else "\0" for piece in pieces)
    expected = alternation(tokenizer.control_words).findall(trusted)
    if all(piece.trusted for piece in pieces) or not any(word in ("<|", "|>", "im_end") for word, _ in parts):
        assert [tokenizer.token(index) for index in ids if index in tokenizer.special_ids] == expected


def test_the_flags_of_control_words_hold_on_the_careful_path(tmp_path: Path) -> None:
    """A control word that swallows the spaces after it does so whether or not a user typed another one."""
    backend = json.loads(vocab.byte_level().backend.to_str())
    for token in backend["added_tokens"]:
        token["rstrip"] = token["content"] == "<|end|>"
    (tmp_path / "tokenizer.json").write_text(json.dumps(backend))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    chat = "one<|end|>   two"
    ordinary = tokenizer.encode_pieces([Piece(chat)])
    careful = tokenizer.encode_pieces([Piece(chat), Piece("<|end|>", trusted=False)])
    assert careful[: len(ordinary)] == ordinary and len(careful) > len(ordinary)
    assert tokenizer.token_bytes(ordinary[-1]).strip() != b""


def test_settings_in_the_file_that_cut_or_pad_do_not_count(tmp_path: Path) -> None:
    backend = json.loads(vocab.byte_level().backend.to_str())
    backend["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    backend["padding"] = {"strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                          "pad_type_id": 0, "pad_token": "!"}  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(backend))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.decode(tokenizer.encode("hello world, one")) == "hello world, one"


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"model": {"type": "Unknown"}}', "\0\1"])
def test_a_broken_file_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(StartupError, match="cannot load the tokenizer"):
        Tokenizer(tmp_path / "tokenizer.json")


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="--tokenizer-path"):
        Tokenizer.of(Checkpoint("m", tmp_path, "none", {}))


@pytest.mark.parametrize("text", ["a\ud800", "\udfff" * 3000])
def test_half_a_surrogate_pair_is_the_callers_error(text: str) -> None:
    for ask in (
        smollm2().encode,
        lambda text: smollm2().encode_limited(text, 100),
        lambda text: smollm2().encode_pieces([Piece(text)]),
    ):
        with pytest.raises(BadRequest, match="surrogate"):
            ask(text)


# ---- long texts


@pytest.mark.parametrize("limit", [0, 1, 5, 9, 10, 11])
def test_the_limit_is_exact(limit: int) -> None:
    tokenizer, text = smollm2(), " word" * 10
    if limit >= 10:
        assert len(tokenizer.encode_limited(text, limit)) == 10
        assert len(tokenizer.encode_pieces([Piece(text)], limit)) == 10
    else:
        for ask in (tokenizer.encode_limited, lambda text, limit: tokenizer.encode_pieces([Piece(text)], limit)):
            with pytest.raises(ContextLengthExceeded, match=f"10 tokens; the context length is {limit} tokens"):
                ask(text, limit)


def test_dense_text_is_not_refused_for_its_length() -> None:
    """Runs of spaces are many characters and few tokens."""
    text = " " * 200_000
    ids = smollm2().encode(text)
    assert len(text) > 8 * 8192 > len(ids)
    assert smollm2().encode_limited(text, 8192) == ids


HUGE: dict[str, Any] = {
    "ten megabytes of words": "word " * 2_000_000,
    "a million letters without a space": "a" * 1_000_000,
    "a million digits": "7" * 1_000_000,
    "a million newlines": "\n" * 1_000_000,
    "control words": "<|im_end|>" * 200_000,
}


@pytest.mark.parametrize("name", HUGE)
def test_huge_texts_are_refused_early(name: str) -> None:
    tokenizer = smollm2()
    tokenizer.encode("warm")
    start = time.perf_counter()
    with pytest.raises(ContextLengthExceeded, match=r"characters, which are more than \d+ tokens"):
        tokenizer.encode_limited(HUGE[name], 8192)
    assert time.perf_counter() - start < 2


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    tokenizer, text = smollm2(), "word " * 200_000
    worker = threading.Thread(target=tokenizer.encode, args=(text,))
    turns = 0
    worker.start()
    while worker.is_alive():
        turns += 1
        time.sleep(0.001)
    assert turns > 5


# ---- words


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text("ab<|>", min_size=1, max_size=4)), st.text("ab<|>", max_size=30))
def test_alternation_finds_the_longest_word_first(words: list[str], text: str) -> None:
    found = [match.span() for match in alternation(words).finditer(text)]
    expected, at = [], 0
    while at < len(text):
        longest = max((len(word) for word in words if text.startswith(word, at)), default=0)
        if longest:
            expected.append((at, at + longest))
        at += longest or 1
    assert found == expected
