"""Joined deltas against the library's decoding of the whole list, for every kind of vocabulary and every split."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixlm.text.detok import ByteLevelDetok, Decoding, PieceDetok, WindowDetok
from support import vocab
from support.vocab import Vocab

#: Decoders whose every token list must come out exactly.
EXACT: dict[str, Callable[[], Vocab]] = {
    "byte level": vocab.byte_level,
    "byte fallback": vocab.byte_fallback,
    "byte fallback, two spaces stripped": lambda: vocab.byte_fallback(2),
    "byte fallback, nothing stripped": lambda: vocab.byte_fallback(0),
    "metaspace": vocab.metaspace,
    "metaspace, no prefix": lambda: vocab.metaspace("never"),
    "suffixes": vocab.suffixed,
    "word pieces": vocab.wordpiece,
}


def stream(decoding: Decoding, ids: list[int], sizes: list[int], skip: bool) -> str:
    """Push `ids` in pieces of these sizes, the last piece repeating."""
    detok, text, start = decoding.open(skip), "", 0
    for index in range(len(ids)):
        size = sizes[min(index, len(sizes) - 1)]
        text += detok.push(ids[start : start + size])
        start += size
    return text + detok.finish()


@pytest.mark.parametrize("kind", EXACT)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_ids_in_any_pieces_read_as_the_whole_list(kind: str, data: st.DataObject) -> None:
    words = EXACT[kind]()
    size = words.backend.get_vocab_size()
    # Ids past the vocabulary too, and more of the added tokens at its end than chance would bring.
    ids = data.draw(st.lists(st.one_of(st.integers(0, size + 1), st.integers(size - 8, size - 1)), max_size=20))
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    skip = data.draw(st.booleans())
    assert stream(Decoding(words), ids, sizes, skip) == words.decode(ids, skip)


@pytest.mark.parametrize("make", [vocab.byte_level, vocab.byte_fallback], ids=["byte level", "byte fallback"])
@settings(max_examples=200, deadline=None)
@given(
    text=st.text("aé漢🙂", max_size=12), gaps=st.sets(st.integers(0, 30)), sizes=st.lists(st.integers(1, 3), min_size=1)
)
def test_characters_with_missing_bytes_read_as_the_library_reads_them(
    make: Callable[[], Vocab], text: str, gaps: set[int], sizes: list[int]
) -> None:
    words = make()
    ids = [token for index, token in enumerate(words.encode(text)) if index not in gaps]
    assert stream(Decoding(words), ids, sizes, True) == words.decode(ids)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40), size=st.integers(1, 5))
def test_text_survives_the_round_trip(text: str, size: int) -> None:
    words = vocab.byte_level()
    ids = words.encode(text)
    assert stream(Decoding(words), ids, [size], skip=False) == text


def test_a_character_is_never_shown_in_part() -> None:
    words = vocab.byte_level()
    text = "👨‍👩‍👧‍👦 čtyřlístek 漢字 🇨🇿 naïve  two  spaces"
    detok = Decoding(words).open()
    shown = ""
    for token in words.encode(text):
        shown += detok.push([token])
        assert text.startswith(shown)
    assert shown == text
    assert detok.finish() == ""


def test_a_character_cut_off_by_the_end_becomes_a_replacement() -> None:
    words = vocab.byte_level()
    ids = words.encode("🙂")[:-1]
    detok = Decoding(words).open()
    assert "".join(detok.push([token]) for token in ids) == ""
    assert detok.finish() == words.decode(ids) == "\ufffd"


def test_leading_and_repeated_spaces_are_kept() -> None:
    words = vocab.byte_level()
    text = "  two  spaces,   then  "
    detok = Decoding(words).open()
    assert "".join(detok.push([token]) for token in words.encode(text)) == text


def test_one_bad_byte_voids_its_whole_run() -> None:
    words = vocab.byte_fallback()
    good = [words.backend.token_to_id(f"<0x{byte:02X}>") for byte in "你".encode()]
    bad = words.backend.token_to_id("<0xFF>")
    word = words.backend.token_to_id("b")
    detok = Decoding(words).open()
    assert detok.push(good) == ""  # readable, but a bad byte may follow
    assert detok.tail() == "你"
    assert detok.push([word]) == "你b"
    assert detok.push([*good, bad]) == detok.tail() == ""
    assert detok.push([word]) == "\ufffd\ufffd\ufffd\ufffdb"


def test_special_tokens_are_hidden_or_shown() -> None:
    for make in EXACT.values():
        words = make()
        decoding = Decoding(words)
        assert decoding.open(True).push([words.eos] * 8) == ""
    words = vocab.byte_level()
    assert Decoding(words).open(False).push([words.eos] * 8) == "<|end|>" * 8


def test_a_hidden_token_does_not_make_the_next_one_the_first() -> None:
    for make in (vocab.byte_fallback, vocab.metaspace, vocab.wordpiece):
        words = make()
        first, second = (1, 3) if make is vocab.wordpiece else (words.backend.token_to_id(t) for t in ("b", "▁hello"))
        ids = [first, words.eos, second]
        assert stream(Decoding(words), ids, [1], skip=True) == words.decode(ids)
        assert " " in words.decode(ids)


def test_the_fast_rules_are_chosen_where_they_hold() -> None:
    kinds = {kind: type(Decoding(make()).open()) for kind, make in EXACT.items()}
    assert kinds["byte level"] is ByteLevelDetok
    assert all(kinds[kind] is PieceDetok for kind in kinds if kind.startswith(("byte fallback", "metaspace")))
    assert kinds["suffixes"] is kinds["word pieces"] is WindowDetok


def test_sequences_do_not_share_state() -> None:
    words = vocab.byte_level()
    decoding = Decoding(words)
    one, two = decoding.open(), decoding.open()
    head, tail = words.encode("é")[:1], words.encode("é")[1:]
    assert one.push(head) == ""
    assert two.push(words.encode("plain")) == "plain"
    assert one.push(tail) + one.finish() == words.decode(head + tail)


def test_a_negative_id_is_an_error() -> None:
    for make in EXACT.values():
        with pytest.raises(OverflowError):
            Decoding(make()).open().push([-1])
