"""This module owns the translation of a GGUF vocabulary into the format of the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from radixlm.base.errors import StartupError
from radixlm.checkpoint.gguf import Gguf

Json = dict[str, Any]

#: Numbers of `tokenizer.ggml.token_type`.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5

#: Control tokens that end a text or a turn, under the names that chat models give them.
_END_NAMES = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end|>",
    "<end_of_turn>",
    "<eos>",
    "</s>",
)

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(digits: str) -> str:
    """Words with one leading sign, `digits`, runs of signs, runs of spaces. Qwen and Llama 3 differ in digits alone."""
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


@dataclass(frozen=True, slots=True)
class _Split:
    """How a byte-level BPE cuts text before it merges.

    Attributes:
        pattern: regex of a piece ("": the one of GPT-2, which the library has built in).
        digits: every digit is a piece of its own.
        whole: a piece that is a token is taken as it is, whatever the merges say.
    """

    pattern: str = ""
    digits: bool = False
    nfc: bool = False
    whole: bool = False
    adds_bos: bool = False


_GPT2, _LLAMA3 = _Split(), _Split(_words(r"\p{N}{1,3}"), whole=True, adds_bos=True)
_QWEN2 = _Split(_words(r"\p{N}"), nfc=True)
_SPLITS: Mapping[str, _Split] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _Split(digits=True),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
}


class _Vocabulary:
    """`tokenizer.ggml.*`, checked."""

    def __init__(self, gguf: Gguf) -> None:
        self.gguf = gguf
        self.kind = self.get("model")
        tokens = self.get("tokens")
        if not isinstance(tokens, list) or not tokens:
            raise self.bad("it holds no tokenizer")
        types = self.get("token_type")
        self.types: list[int] = types.tolist() if isinstance(types, np.ndarray) else [_NORMAL] * len(tokens)
        if len(self.types) != len(tokens):
            raise self.bad(f"it has {len(tokens)} tokens and {len(self.types)} token types")
        # Embedding tables are padded to a round size, and the padding gets names. They are not part of the vocabulary.
        count = len(tokens)
        while count > 1 and self.types[count - 1] == _UNUSED:
            count -= 1
        self.tokens: list[str] = tokens[:count]
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if len(self.ids) != count:
            twice = next(token for index, token in enumerate(self.tokens) if self.ids[token] != index)
            raise self.bad(f"two tokens are spelled {twice!r}")

    def bad(self, reason: str) -> StartupError:
        return StartupError(
            f"cannot make a tokenizer from {self.gguf.path}: {reason}; "
            "--tokenizer-path names the directory of another tokenizer"
        )

    def get(self, key: str, default: Any = None) -> Any:
        return self.gguf.metadata.get(f"tokenizer.ggml.{key}", default)

    def special(self, role: str) -> int | None:
        """The id of bos, eos, eot, eom, unknown or padding, if the file names one that exists."""
        value = self.get(f"{role}_token_id")
        return value if type(value) is int and 0 <= value < len(self.tokens) else None

    def text(self, role: str) -> str | None:
        index = self.special(role)
        return None if index is None else self.tokens[index]


def tokenizer_files(gguf: Gguf) -> tuple[Json, Json, Json]:
    """The contents of tokenizer.json, tokenizer_config.json and generation_config.json.

    Raises:
        StartupError: the kind of vocabulary is not known here (its name is in the message), or it is damaged.
    """
    vocabulary = _Vocabulary(gguf)
    if vocabulary.kind == "gpt2":
        tokenizer = _byte_level(vocabulary)
    elif vocabulary.kind == "llama":
        tokenizer = _scored(vocabulary)
    else:
        raise vocabulary.bad(f"its tokenizer model is {vocabulary.kind!r}; gpt2 and llama are known")
    return tokenizer, _tokenizer_config(vocabulary), _generation_config(vocabulary)


def _byte_level(vocabulary: _Vocabulary) -> Json:
    name = vocabulary.get("pre", "default")
    split = _SPLITS.get(name)
    if split is None:
        raise vocabulary.bad(f"its pre-tokenizer is {name!r}; known are {', '.join(_SPLITS)}")
    merges = vocabulary.get("merges")
    if not isinstance(merges, list):
        raise vocabulary.bad("it has no merges")
    steps: list[Json] = []
    if split.digits:
        steps.append({"type": "Digits", "individual_digits": True})
    if split.pattern:
        pattern = {"Regex": split.pattern}
        steps.append({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False})
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps.append({**byte_level, "use_regex": not split.pattern})
    return {
        **_common(vocabulary, adds_bos=split.adds_bos),
        "normalizer": {"type": "NFC"} if split.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": {**byte_level, "use_regex": True},
        "model": _bpe(vocabulary, [merge.split(" ", 1) for merge in merges], ignore_merges=split.whole),
    }


def _scored(vocabulary: _Vocabulary) -> Json:
    """SentencePiece BPE. The file has scores instead of merges: two neighbours merge where their join is a token, the
    best score first. Unknown characters fall back to the tokens of their bytes.
    """
    scores = vocabulary.get("scores")
    if not isinstance(scores, np.ndarray) or len(scores) < len(vocabulary.tokens):
        raise vocabulary.bad("it has no scores")
    prefix: list[Json] = []
    strip: list[Json] = []
    if vocabulary.get("add_space_prefix", True):
        prefix = [{"type": "Prepend", "prepend": "▁"}]
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    unknown = vocabulary.text("unknown")
    return {
        **_common(vocabulary, adds_bos=True),
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, spaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": {
            **_bpe(vocabulary, _merges(vocabulary, scores.tolist())),
            "unk_token": unknown,
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }


def _merges(vocabulary: _Vocabulary, scores: Sequence[float]) -> list[list[str]]:
    """Every way to make a token of two others, the best token first."""
    ids, types = vocabulary.ids, vocabulary.types
    order = sorted(
        (index for index in range(len(vocabulary.tokens)) if types[index] in (_NORMAL, _USER_DEFINED)),
        key=lambda index: -scores[index],  # the sort is stable: equal scores stay in the order of ids
    )
    merges: list[list[str]] = []
    for index in order:
        token = vocabulary.tokens[index]
        pairs = [
            (ids[token[:cut]], ids[token[cut:]], token[:cut], token[cut:])
            for cut in range(1, len(token))
            if token[:cut] in ids and token[cut:] in ids
        ]
        merges.extend([left, right] for _, _, left, right in sorted(pairs))
    return merges


def _bpe(vocabulary: _Vocabulary, merges: list[list[str]], ignore_merges: bool = False) -> Json:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": ignore_merges,
        "vocab": vocabulary.ids,
        "merges": merges,
    }


def _common(vocabulary: _Vocabulary, adds_bos: bool) -> Json:
    """What both kinds share: tokens that are matched in the text as a whole, and the start and end tokens around it."""
    whole = (_UNKNOWN, _CONTROL, _USER_DEFINED)
    added = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": vocabulary.types[index] != _USER_DEFINED,
        }
        for index, token in enumerate(vocabulary.tokens)
        if vocabulary.types[index] in whole and token
    ]
    around = {
        "bos": vocabulary.text("bos") if vocabulary.get("add_bos_token", adds_bos) else None,
        "eos": vocabulary.text("eos") if vocabulary.get("add_eos_token", False) else None,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "post_processor": _surround(around["bos"], around["eos"], vocabulary.ids),
    }


def _surround(bos: str | None, eos: str | None, ids: Mapping[str, int]) -> Json | None:
    if bos is None and eos is None:
        return None

    def sequence(name: str, segment: int) -> list[Json]:
        first = [{"SpecialToken": {"id": bos, "type_id": segment}}] if bos is not None else []
        last = [{"SpecialToken": {"id": eos, "type_id": segment}}] if eos is not None else []
        return [*first, {"Sequence": {"id": name, "type_id": segment}}, *last]

    used = [token for token in (bos, eos) if token is not None]
    return {
        "type": "TemplateProcessing",
        "single": sequence("A", 0),
        "pair": sequence("A", 0) + sequence("B", 1),
        "special_tokens": {token: {"id": token, "ids": [ids[token]], "tokens": [token]} for token in used},
    }


def _tokenizer_config(vocabulary: _Vocabulary) -> Json:
    roles = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    config: Json = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {f"{ours}_token": vocabulary.text(theirs) for theirs, ours in roles.items()}
    metadata = vocabulary.gguf.metadata
    templates = {
        key.removeprefix("tokenizer.chat_template.") or "default": value
        for key, value in metadata.items()
        if key.startswith("tokenizer.chat_template.") and isinstance(value, str)
    }
    default = metadata.get("tokenizer.chat_template")
    if templates and isinstance(default, str):
        templates["default"] = default
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    elif isinstance(default, str):
        config["chat_template"] = default
    return {key: value for key, value in config.items() if value is not None}


def _generation_config(vocabulary: _Vocabulary) -> Json:
    named = [vocabulary.special(role) for role in ("eos", "eot", "eom")]
    by_name = [vocabulary.ids.get(name) for name in _END_NAMES]
    ends = [index for index in named if index is not None]
    ends += [index for index in by_name if index is not None and vocabulary.types[index] == _CONTROL]
    config: Json = {"bos_token_id": vocabulary.special("bos"), "pad_token_id": vocabulary.special("padding")}
    config["eos_token_id"] = list(dict.fromkeys(ends)) or None
    return {key: value for key, value in config.items() if value is not None}
