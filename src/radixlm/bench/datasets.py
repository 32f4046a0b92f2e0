"""This module owns the workloads: seeded sessions of prompts and answer lengths. Equal specs give equal sessions."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from radixlm.base.errors import BadRequest
from radixlm.bench.source import CHARACTERS_PER_TOKEN, Cutter, Encode, Source

NAMES = ("random", "shared-prefix", "multi-turn", "custom")
#: Names that other load generators give to the same data sets.
SYNONYMS = {"generated-shared-prefix": "shared-prefix", "sharegpt": "custom", "random-ids": "random"}

#: The counts of a `Spec` and the flags they are given with.
COUNTS = {
    "count": "--num-prompts",
    "input_len": "--random-input-len",
    "output_len": "--random-output-len",
    "groups": "--num-groups",
    "shared_len": "--shared-len",
    "own_len": "--own-len",
    "turns": "--num-turns",
}

#: ShareGPT holds scraps and giants; its users keep conversations within these lengths (tokens).
MIN_TOKENS, MAX_PROMPT, MAX_TOTAL = 4, 1024, 2048


@dataclass(frozen=True, slots=True)
class Turn:
    """What a user says, and how long the answer is. Exactly one of `ids` and `text` is set."""

    max_tokens: int
    ids: tuple[int, ...] | None = None
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Session:
    """Turns of one conversation. The prompt of a turn is all that was said so far, answers too, then its own part."""

    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What to generate. Lengths are tokens.

    Attributes:
        count: sessions (each one request, except in `multi-turn`).
        range_ratio: `random` draws each length uniformly from [ratio x length, length].
        groups: `shared-prefix`: sessions are dealt to this many prefixes, then shuffled.
        turns: `multi-turn`: requests of a session; `input_len` is what the user adds in each.
        path: `custom`: the file.
        as_text: prompts as text instead of token ids.
    """

    name: str = "random"
    count: int = 100
    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 1.0
    groups: int = 8
    shared_len: int = 1024
    own_len: int = 64
    turns: int = 4
    path: str | None = None
    seed: int = 0
    as_text: bool = False

    def check(self) -> None:
        """Raise `BadRequest` naming the first value that makes no workload."""
        if self.name not in NAMES:
            raise BadRequest(f"unknown dataset {self.name!r}; known: {', '.join(NAMES)}", param="dataset_name")
        for field, flag in COUNTS.items():
            value = getattr(self, field)
            if value < 1:
                raise BadRequest(f"{flag} is {value}; it must be at least 1", param=field)
        if not 0.0 <= self.range_ratio <= 1.0:
            raise BadRequest(f"--random-range-ratio is {self.range_ratio}; it must be in [0, 1]", param="range_ratio")
        if self.name == "custom" and not self.path:
            raise BadRequest("the custom dataset needs --dataset-path FILE", param="path")

    def described(self) -> dict[str, Any]:
        return asdict(self)


def build(spec: Spec, source: Source, encode: Encode | None = None) -> list[Session]:
    """The sessions of a workload; fewer than `spec.count` if a file holds fewer.

    Args:
        encode: counts the tokens of answers in a ShareGPT file; without it they are estimated from characters.
    """
    spec.check()
    rng = random.Random(f"{spec.seed}/{spec.name}")
    cutter = Cutter(source, rng)
    if spec.name == "random":
        return list(_random(spec, cutter, rng))
    if spec.name == "shared-prefix":
        return _shared_prefix(spec, cutter, rng)
    if spec.name == "multi-turn":
        return list(_multi_turn(spec, cutter))
    return _custom(spec, rng, encode)


def _cut(spec: Spec, cutter: Cutter, length: int, max_tokens: int) -> Turn:
    if spec.as_text:
        return Turn(max_tokens, text=cutter.text(length))
    return Turn(max_tokens, ids=tuple(cutter.ids(length)))


def _random(spec: Spec, cutter: Cutter, rng: random.Random) -> Iterator[Session]:
    def length(longest: int) -> int:
        return rng.randint(max(1, round(longest * spec.range_ratio)), longest)

    for _ in range(spec.count):
        yield Session((_cut(spec, cutter, length(spec.input_len), length(spec.output_len)),))


def _shared_prefix(spec: Spec, cutter: Cutter, rng: random.Random) -> list[Session]:
    prefixes = [_cut(spec, cutter, spec.shared_len, 0) for _ in range(min(spec.groups, spec.count))]
    sessions = []
    for i in range(spec.count):
        prefix = prefixes[i % len(prefixes)]
        own = _cut(spec, cutter, spec.own_len, spec.output_len)
        if spec.as_text:
            turn = Turn(spec.output_len, text=f"{prefix.text}\n\n{own.text}")
        else:
            turn = Turn(spec.output_len, ids=(prefix.ids or ()) + (own.ids or ()))
        sessions.append(Session((turn,)))
    rng.shuffle(sessions)
    return sessions


def _multi_turn(spec: Spec, cutter: Cutter) -> Iterator[Session]:
    for _ in range(spec.count):
        yield Session(tuple(_cut(spec, cutter, spec.input_len, spec.output_len) for _ in range(spec.turns)))


def _custom(spec: Spec, rng: random.Random, encode: Encode | None) -> list[Session]:
    path = Path(spec.path or "")
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise BadRequest(f"cannot read {path}: {error.strerror}", param="path") from None

    def count(piece: str) -> int:
        return len(encode(piece)) if encode else round(len(piece) / CHARACTERS_PER_TOKEN)

    records = _array(text) if text.lstrip().startswith("[") else _lines(text, path)
    rng.shuffle(records)
    sessions: list[Session] = []
    # counting tokens is slow: records are looked at only until there are enough
    for record in records:
        if len(sessions) == spec.count:
            break
        turn = _turn_of(record, spec, count)
        if turn is None:
            continue
        if encode is not None and not spec.as_text:
            turn = Turn(turn.max_tokens, ids=tuple(encode(turn.text or "")))
        sessions.append(Session((turn,)))
    if not sessions:
        raise BadRequest(
            f"{path} holds no usable prompt: it should be JSON lines with a `prompt` each, or ShareGPT conversations",
            param="path",
        )
    return sessions


def _lines(text: str, path: Path) -> list[Any]:
    records = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                records.append(json.loads(line))
            except ValueError as error:
                raise BadRequest(f"{path}, line {number}: not JSON ({error})", param="path") from None
    return records


def _array(text: str) -> list[Any]:
    """The elements of a JSON array, up to where it is cut off: some copies of ShareGPT end in the middle."""
    decoder = json.JSONDecoder()
    separators = re.compile(r"[\s,]*")
    records: list[Any] = []
    at = text.index("[") + 1
    while True:
        found = separators.match(text, at)
        at = found.end() if found else at
        try:
            record, at = decoder.raw_decode(text, at)
        except ValueError:
            return records
        records.append(record)


def _turn_of(record: Any, spec: Spec, count: Callable[[str], int]) -> Turn | None:
    """The first exchange of a ShareGPT conversation within the usual lengths, or a `prompt` record; None for others."""
    if not isinstance(record, dict):
        return None
    prompt = record.get("prompt")
    if isinstance(prompt, str) and prompt:
        wanted = record.get("max_tokens", record.get("output_tokens", spec.output_len))
        return Turn(wanted if isinstance(wanted, int) and wanted > 0 else spec.output_len, text=prompt)
    said = record.get("conversations") or record.get("conversation")
    if not isinstance(said, list) or len(said) < 2 or not all(isinstance(part, dict) for part in said[:2]):
        return None
    question, answer = (str(part.get("value", part.get("content", ""))) for part in said[:2])
    prompt_len, answer_len = count(question), count(answer)
    if min(prompt_len, answer_len) < MIN_TOKENS or prompt_len > MAX_PROMPT or prompt_len + answer_len > MAX_TOTAL:
        return None
    return Turn(answer_len, text=question)
