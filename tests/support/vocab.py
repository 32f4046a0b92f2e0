"""Small tokenizers of the kinds that models have, made on the spot."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = [
    "hello world, one, two, three, four, five  two  spaces\n\n### User: stop here",
    "čtyřlístek naïve 漢字 🇨🇿 👨‍👩‍👧‍👦 def f(x):\n\treturn x + 1\n",
]


@dataclass(frozen=True)
class Vocab:
    """What the text modules ask of a tokenizer."""

    backend: Tokenizer

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)

    @property
    def eos(self) -> int:
        return next(i for i, token in self.backend.get_added_tokens_decoder().items() if token.content == "<|end|>")

    def encode(self, text: str) -> list[int]:
        return list(self.backend.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return str(self.backend.decode(ids, skip_special_tokens=skip_special_tokens))


@cache
def byte_level() -> Vocab:
    """GPT-2's kind: every byte is a token, with merges of a small corpus and added tokens of both spellings."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    return _with_added(backend)


@cache
def byte_fallback(strip: int = 1) -> Vocab:
    """Llama 2's kind: pieces with a mark for the space, byte tokens for the rest, `strip` leading spaces dropped."""
    backend = _pieces(byte_fallback=True)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", strip, 0)] if strip else steps)
    return _with_added(backend)


@cache
def metaspace(prepend: str = "always") -> Vocab:
    """Unigram's kind: pieces with a mark for the space, dropped from the first token."""
    backend = _pieces(byte_fallback=False)
    backend.decoder = decoders.Metaspace(prepend_scheme=prepend)
    return _with_added(backend)


@cache
def suffixed() -> Vocab:
    """The first BPE models' kind: a suffix ends a word, and what it reads depends on whether a token follows."""
    vocab = {token: i for i, token in enumerate(["<unk>", "a", "b</w>", "bc", "é</w>", "</w>"])}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    backend.decoder = decoders.BPEDecoder("</w>")
    return _with_added(backend)


@cache
def wordpiece() -> Vocab:
    """BERT's kind: tokens are words unless they say that they continue one."""
    vocab = {token: i for i, token in enumerate(["[UNK]", "a", "##b", "word", ",", "##s"])}
    backend = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    return _with_added(backend)


def _pieces(byte_fallback: bool) -> Tokenizer:
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", "▁▁", "▁a", "▁▁b", "b", "é", "漢", "▁hello", "x▁y", "real space", "\n", "<0xZZ>", "<0x-1>"]
    vocab = {token: i for i, token in enumerate(tokens)}
    return Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=byte_fallback))


def _with_added(backend: Tokenizer) -> Vocab:
    backend.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<|user|>", special=True)])
    backend.add_tokens(["Ġé", "▁zé▁", "漢 字"])
    return Vocab(backend)
