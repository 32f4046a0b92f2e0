"""Structural tags by their plain meaning: which texts belong to a format, random formats, and texts drawn from them.

The matcher is the oracle of the tests. It looks at all ways to read a text and knows nothing of lexers or borders.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import jsonschema

from radixlm.grammar import tags
from radixlm.grammar.tags import Format

#: Free text is drawn from these; borders and triggers have none of them.
FREE = "xyz \né漢"
OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["p", "q"]}},
    "required": ["a"],
    "additionalProperties": False,
}
SCHEMAS: list[tuple[Any, list[str]]] = [
    (OBJECT, ['{"a": 5}', '{"a": -12, "b": "q"}']),
    ({"enum": [True, "t"]}, ["true", '"t"']),
    ({"type": "array", "items": {"type": "boolean"}, "minItems": 1}, ["[true]", "[false, true]"]),
]
REGEXES = {"[0-9]{2,4}": ["12", "4711"], "(?:ab|c)+d?": ["ab", "cabd"], "k|lm": ["k", "lm"]}


def belongs(item: Format, text: str) -> bool:
    """The whole text is one of the format."""
    return len(text) in _ends(item, text, 0)


def _ends(item: Format, text: str, at: int) -> set[int]:
    """Where a part of the text that begins at `at` and is one of the format may end."""
    if isinstance(item, tags.ConstString):
        return _literal(item.value, text, at)
    if isinstance(item, tags.Regex):
        return {end for end in range(at, len(text) + 1) if re.fullmatch(item.pattern, text[at:end])}
    if isinstance(item, tags.AnyText):
        longest = len(text) if item.max_chars is None else at + item.max_chars
        return _free(text, at, item.excludes, longest)
    if isinstance(item, tags.JsonSchema):
        return _json(item.json_schema, text, at)
    if isinstance(item, tags.Sequence):
        found = {at}
        for element in item.elements:
            found = {end for start in found for end in _ends(element, text, start)}
        return found
    if isinstance(item, tags.Or):
        return {end for element in item.elements for end in _ends(element, text, at)}
    if isinstance(item, tags.Tag):
        assert isinstance(item.begin, str)
        middles = {end for start in _literal(item.begin, text, at) for end in _ends(item.content, text, start)}
        return {end for middle in middles for mark in item.ends for end in _literal(str(mark), text, middle)}
    if isinstance(item, tags.Optional | tags.Plus | tags.Star | tags.Repeat):
        least, most = {
            tags.Optional: (0, 1),
            tags.Plus: (1, -1),
            tags.Star: (0, -1),
        }.get(type(item)) or (item.min, item.max)  # type: ignore[union-attr]
        return _repeated(lambda start: _ends(item.content, text, start), at, least, most)
    if isinstance(item, tags.TagsWithSeparator):
        separated = tags.Sequence((tags.ConstString(item.separator), tags.Or(item.tags)))
        more: Format = tags.Repeat(0, 0 if item.stop_after_first else -1, separated)
        whole: Format = tags.Sequence((tags.Or(item.tags), more))
        return _ends(whole if item.at_least_one else tags.Optional(whole), text, at)
    assert isinstance(item, tags.TriggeredTags)
    first = _ends(tags.Or(item.tags), text, at) if item.at_least_one else {at}
    if item.stop_after_first and item.at_least_one:
        return first
    found, waiting = set[int](), list(first)
    seen = set(first)
    while waiting:
        for end in _free(text, waiting.pop(), (*item.excludes, *item.triggers), len(text)):
            found.add(end)
            for behind in _ends(tags.Or(item.tags), text, end) - seen:
                seen.add(behind)
                if item.stop_after_first:
                    found.add(behind)
                else:
                    waiting.append(behind)
    return found


def _literal(value: str, text: str, at: int) -> set[int]:
    return {at + len(value)} if text.startswith(value, at) else set()


def _free(text: str, at: int, excludes: tuple[str, ...], longest: int) -> set[int]:
    found = set()
    for end in range(at, min(len(text), longest) + 1):
        if any(text[at:end].endswith(word) for word in excludes):
            break
        found.add(end)
    return found


def _json(schema: Any, text: str, at: int) -> set[int]:
    found = set()
    for end in range(at + 1, len(text) + 1):
        try:
            value = json.loads(text[at:end])
        except ValueError:
            continue
        if text[at:end] == text[at:end].strip() and jsonschema.Draft202012Validator(schema).is_valid(value):
            found.add(end)
    return found


def _repeated(step: Callable[[int], set[int]], at: int, least: int, most: int) -> set[int]:
    found, now, count = set[int](), {at}, 0
    while now:
        if count >= least:
            if now <= found:
                break
            found |= now
        if count == most:
            break
        now = {end for start in now for end in step(start)}
        count += 1
    return found


class Maker:
    """Random formats that can be told apart: every fixed text has a number of its own."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._count = 0

    def _mark(self, form: str) -> str:
        self._count += 1
        return form.format(self._count)

    def format(self, depth: int = 0) -> Format:
        kinds = [self.value, self.value, self.tag]
        if depth < 3:
            kinds += [self.sequence, self.either, self.repeat, self.triggered, self.separated]
        return self._rng.choice(kinds)(depth + 1)

    def value(self, depth: int) -> Format:
        kind = self._rng.randrange(3)
        if kind == 0:
            return tags.ConstString(self._mark("c{};"))
        if kind == 1:
            return tags.Regex(self._rng.choice(list(REGEXES)))
        return tags.JsonSchema(self._rng.choice(SCHEMAS)[0])

    def tag(self, depth: int) -> tags.Tag:
        content: Format = tags.AnyText() if self._rng.random() < 0.3 else self.closed(depth)
        ends = self._mark("</{}>")
        return tags.Tag(self._mark("<{}>"), content, (ends, self._mark("!{}!")) if self._rng.random() < 0.2 else ends)

    def closed(self, depth: int) -> Format:
        """What goes into a tag: free text too, which the tag's end ends."""
        return self.format(depth) if depth < 3 else self.value(depth)

    def sequence(self, depth: int) -> Format:
        elements: list[Format] = []
        for _ in range(self._rng.randint(1, 3)):
            if self._rng.random() < 0.4:
                elements += [tags.AnyText(), tags.ConstString(self._mark("|{}|"))]
            elements.append(self._bounded(depth))
            elements.append(tags.ConstString(self._mark("#{};")))
        return tags.Sequence(tuple(elements))

    def either(self, depth: int) -> Format:
        return tags.Or(tuple(self._bounded(depth) for _ in range(self._rng.randint(1, 3))))

    def repeat(self, depth: int) -> Format:
        content = tags.Sequence((self._bounded(depth), tags.ConstString(self._mark("~{};"))))
        least = self._rng.randrange(3)
        most = self._rng.choice([-1, least, least + 2])
        return self._rng.choice(
            [tags.Optional(content), tags.Plus(content), tags.Star(content), tags.Repeat(least, most, content)]
        )

    def triggered(self, depth: int) -> Format:
        trigger = self._mark("[{}")
        options = [self._tag_of(f"{trigger}{name}]", depth) for name in ("f", "g")[: self._rng.randint(1, 2)]]
        return tags.Tag(
            self._mark("<{}>"),
            tags.TriggeredTags((trigger,), tuple(options), self._rng.random() < 0.3, self._rng.random() < 0.3),
            self._mark("</{}>"),
        )

    def separated(self, depth: int) -> Format:
        return tags.TagsWithSeparator(
            (self._tag_of(self._mark("<{}>"), depth), self._tag_of(self._mark("<{}>"), depth)),
            self._mark(",{},"),
            self._rng.random() < 0.5,
            self._rng.random() < 0.3,
        )

    def _tag_of(self, begin: str, depth: int) -> tags.Tag:
        return tags.Tag(begin, self.closed(depth + 1), self._mark("</{}>"))

    def _bounded(self, depth: int) -> Format:
        return self.format(depth) if depth < 3 else self.value(depth)


def sample(item: Format, rng: random.Random) -> str:
    """A text of the format."""
    if isinstance(item, tags.ConstString):
        return item.value
    if isinstance(item, tags.Regex):
        return rng.choice(REGEXES[item.pattern])
    if isinstance(item, tags.AnyText):
        return _free_text(rng)
    if isinstance(item, tags.JsonSchema):
        return rng.choice(next(texts for schema, texts in SCHEMAS if schema == item.json_schema))
    if isinstance(item, tags.Sequence):
        return "".join(sample(element, rng) for element in item.elements)
    if isinstance(item, tags.Or):
        return sample(rng.choice(item.elements), rng)
    if isinstance(item, tags.Tag):
        return f"{item.begin}{sample(item.content, rng)}{rng.choice(item.ends)}"
    if isinstance(item, tags.Optional):
        return sample(item.content, rng) if rng.random() < 0.5 else ""
    if isinstance(item, tags.Plus | tags.Star | tags.Repeat):
        least, most = (item.min, item.max) if isinstance(item, tags.Repeat) else (int(isinstance(item, tags.Plus)), -1)
        count = rng.randint(least, least + 2 if most < 0 else most)
        return "".join(sample(item.content, rng) for _ in range(count))
    assert isinstance(item, tags.TagsWithSeparator | tags.TriggeredTags)
    count = rng.randint(int(item.at_least_one), 1 if item.stop_after_first else 3)
    found = [sample(rng.choice(item.tags), rng) for _ in range(count)]
    if isinstance(item, tags.TagsWithSeparator):
        return item.separator.join(found)
    parts = ["" if item.at_least_one else _free_text(rng)]
    for text in found:
        parts += [text, _free_text(rng)]
    return "".join(parts[:-1] if found and item.stop_after_first else parts if found or not item.at_least_one else [])


def _free_text(rng: random.Random) -> str:
    return "".join(rng.choice(FREE) for _ in range(rng.randrange(6)))
