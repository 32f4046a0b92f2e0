"""This module owns structural tags as data: what clients send becomes one tree of formats, whatever backend serves it.

Two forms are understood. `{"type": "structural_tag", "format": {...}}` names a format by its `type`. The older one,
`{"type": "structural_tag", "structures": [{"begin": "<f>", "schema": {...}, "end": "</f>"}], "triggers": ["<f"]}`,
is free text in which a trigger opens one of the structures that begin with it: a `triggered_tags`.

Names and meaning of the formats are those of XGrammar's structural tags. A field that is not known is refused, since
passing over it would allow what it forbids.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from radixlm.grammar.base import GrammarError

#: Formats within formats, and all together.
MAX_DEPTH, MAX_FORMATS = 40, 10_000

Schema = dict[str, Any] | bool


class _Format(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    pass


class ConstString(_Format, frozen=True, tag="const_string"):
    value: str


class JsonSchema(_Format, frozen=True, tag="json_schema"):
    """
    Attributes:
        style: `json`, or the name of another way to write the value.
    """

    json_schema: Schema
    style: str = "json"
    any_order: bool = False
    max_whitespace_cnt: int | None = None
    excludes: tuple[str, ...] = ()


class QwenXml(_Format, frozen=True, tag="qwen_xml_parameter"):
    """The older name of a JSON schema in the style `qwen_xml`."""

    json_schema: Schema


class AnyText(_Format, frozen=True, tag="any_text"):
    """Any text, up to what must follow it."""

    excludes: tuple[str, ...] = ()
    max_tokens: int | None = None
    max_chars: int | None = None


class Regex(_Format, frozen=True, tag="regex"):
    pattern: str


class GrammarText(_Format, frozen=True, tag="grammar"):
    grammar: str
    syntax: Literal["ebnf", "lark"] = "ebnf"


class Token(_Format, frozen=True, tag="token"):
    token: int | str


class ExcludeToken(_Format, frozen=True, tag="exclude_token"):
    exclude_tokens: tuple[int | str, ...] = ()


class AnyTokens(_Format, frozen=True, tag="any_tokens"):
    exclude_tokens: tuple[int | str, ...] = ()
    max_tokens: int | None = None


class Sequence(_Format, frozen=True, tag="sequence"):
    elements: tuple[Format, ...]


class Or(_Format, frozen=True, tag="or"):
    elements: tuple[Format, ...]


class Optional(_Format, frozen=True, tag="optional"):
    content: Format


class Plus(_Format, frozen=True, tag="plus"):
    content: Format


class Star(_Format, frozen=True, tag="star"):
    content: Format


class Repeat(_Format, frozen=True, tag="repeat"):
    """`max`: -1 for any number."""

    min: int
    max: int
    content: Format


class Tag(_Format, frozen=True, tag="tag"):
    begin: str | Token
    content: Format
    end: str | tuple[str, ...] | Token

    @property
    def ends(self) -> tuple[str | Token, ...]:
        return self.end if isinstance(self.end, tuple) else (self.end,)


class TriggeredTags(_Format, frozen=True, tag="triggered_tags"):
    """Free text in which a trigger must go on to one of the tags that begin with it.

    Attributes:
        at_least_one: it begins with a tag.
        stop_after_first: it ends with the first tag.
    """

    triggers: tuple[str, ...]
    tags: tuple[Tag, ...]
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: tuple[str, ...] = ()


class TagsWithSeparator(_Format, frozen=True, tag="tags_with_separator"):
    tags: tuple[Tag, ...]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


class Dispatch(_Format, frozen=True, tag="dispatch"):
    """Free text in which a pattern must be followed by its format; once, or again and again."""

    rules: tuple[tuple[str, Format], ...]
    loop: bool = True
    excludes: tuple[str, ...] = ()


class TokenTriggeredTags(_Format, frozen=True, tag="token_triggered_tags"):
    trigger_tokens: tuple[int | str, ...]
    tags: tuple[Tag, ...]
    exclude_tokens: tuple[int | str, ...] = ()
    at_least_one: bool = False
    stop_after_first: bool = False


class TokenDispatch(_Format, frozen=True, tag="token_dispatch"):
    rules: tuple[tuple[int | str, Format], ...]
    loop: bool = True
    exclude_tokens: tuple[int | str, ...] = ()


Format = (
    ConstString | JsonSchema | QwenXml | AnyText | Regex | GrammarText | Token | ExcludeToken | AnyTokens | Sequence
    | Or | Optional | Plus | Star | Repeat | Tag | TriggeredTags | TagsWithSeparator | Dispatch | TokenTriggeredTags
    | TokenDispatch
)  # fmt: skip


class _Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: Format
    type: str = "structural_tag"


class _Structure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    begin: str
    end: str
    schema: Schema = {}


class _OldBody(msgspec.Struct, frozen=True):
    structures: tuple[_Structure, ...]
    triggers: tuple[str, ...]


def parse_tag(text: str) -> Format:
    """The tree of a tag's JSON text. Raises `GrammarError` for one that is malformed, or says nothing."""
    try:
        body = msgspec.json.decode(text)
        if isinstance(body, dict) and "structures" in body and "format" not in body:
            return _checked(_of_old(msgspec.convert(body, _OldBody)))
        return _checked(msgspec.convert(body, _Body).format)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise GrammarError(f"the structural tag is malformed: {error}") from None
    except RecursionError:
        raise GrammarError(f"the structural tag is nested more than {MAX_DEPTH} deep") from None


def children(item: Format) -> Iterator[Format]:
    """The formats directly within a format."""
    if isinstance(item, Sequence | Or):
        yield from item.elements
    elif isinstance(item, Optional | Plus | Star | Repeat | Tag):
        yield item.content
    elif isinstance(item, TriggeredTags | TagsWithSeparator | TokenTriggeredTags):
        yield from item.tags
    elif isinstance(item, Dispatch | TokenDispatch):
        yield from (content for _, content in item.rules)


def _of_old(body: _OldBody) -> TriggeredTags:
    tags = tuple(Tag(item.begin, JsonSchema(item.schema), item.end) for item in body.structures)
    return TriggeredTags(body.triggers, tags)


def _checked(whole: Format) -> Format:
    waiting: list[tuple[Format, int]] = [(whole, 1)]
    count = 0
    while waiting:
        item, depth = waiting.pop()
        count += 1
        if count > MAX_FORMATS:
            raise GrammarError(f"the structural tag has more than {MAX_FORMATS} formats")
        if depth > MAX_DEPTH:
            raise GrammarError(f"the structural tag is nested more than {MAX_DEPTH} deep")
        _check(item)
        waiting += [(child, depth + 1) for child in children(item)]
    return whole


def _check(item: Format) -> None:
    """Raises `GrammarError` for a format that could not mean anything."""
    if isinstance(item, Sequence | Or) and not item.elements:
        raise GrammarError("structural tag: a sequence and an `or` need elements")
    if isinstance(item, Repeat) and (item.min < 0 or (item.max != -1 and item.max < item.min)):
        raise GrammarError(f"structural tag: a repeat from {item.min} to {item.max} times is impossible")
    if isinstance(item, Tag) and not item.ends:
        raise GrammarError("structural tag: `end` may be empty but must be there")
    if isinstance(item, TriggeredTags):
        if not item.tags or not item.triggers or not all(item.triggers):
            raise GrammarError("a structural tag needs structures (tags) and triggers, and no trigger may be empty")
        for tag in item.tags:
            if not isinstance(tag.begin, str):
                raise GrammarError("structural tag: tags with triggers begin with texts; see token_triggered_tags")
            if not any(tag.begin.startswith(trigger) for trigger in item.triggers):
                raise GrammarError(f"structure {tag.begin[:40]!r} begins with none of the triggers")
    if isinstance(item, TagsWithSeparator | TokenTriggeredTags) and not item.tags:
        raise GrammarError(f"structural tag: {item.__struct_config__.tag} needs tags")
    if isinstance(item, Dispatch) and not (item.rules and all(pattern for pattern, _ in item.rules)):
        raise GrammarError("structural tag: dispatch needs rules, and no pattern may be empty")
    if isinstance(item, AnyText | TriggeredTags | Dispatch | JsonSchema) and not all(item.excludes):
        raise GrammarError("structural tag: an empty text cannot be excluded")
    if isinstance(item, AnyText) and ((item.max_chars or 0) < 0 or (item.max_tokens or 0) < 0):
        raise GrammarError("structural tag: max_chars and max_tokens may not be negative")
