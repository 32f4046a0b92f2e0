"""This module owns structural tags as grammars in llguidance's dialect of Lark.

The library's lexer takes the longest lexeme, so free text has to know where it ends: it is one lazy lexeme together
with what must follow it (`free[lazy]: TEXT "</think>"` ends at the first `</think>`), or runs to the end of the answer.
So each format is written down together with its border: the texts of which one comes next. Free text whose border is
not fixed is refused. What is regular becomes one lexeme with its border, for the same reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from radixlm.grammar import check, tags
from radixlm.grammar.base import GrammarError, SchemaError
from radixlm.grammar.expression import quoted, translated
from radixlm.grammar.tags import Format, Token
from radixlm.grammar.tags_xml import STYLES, parameters

#: Counted characters of free text, each of which is a state; and repeats of a format.
MAX_COUNT = 4096

#: A text that follows, or a special token.
Mark = str | Token
#: What follows a format: one of these; () for the end of the answer; None for something else.
Border = tuple[Mark, ...] | None
#: A format of a sequence, or a fixed text with its alternatives.
Part = Format | tuple[Mark, ...]


def to_grammar(text: str, form: Mapping[str, Any], special: Mapping[str, int], lark: Callable[[str], str]) -> str:
    """The tag as a grammar of the library, in its JSON form.

    Args:
        form: how JSON is written (`x-guidance`).
        special: special tokens by their text.
        lark: makes Lark of a grammar in another syntax.

    Raises:
        GrammarError: the tag is malformed, or cannot be enforced.
    """
    writer = Writer(form, special, lark)
    start = writer.write(tags.parse_tag(text), ()) or '""'
    rules = "\n".join(["%llguidance {}", f"start: {start}", *writer.rules]) + "\n"
    grammars = [{"name": "tag", "lark_grammar": rules}]
    grammars += [{"name": f"g{i}", "lark_grammar": part} for i, part in enumerate(writer.grammars)]
    return json.dumps({"grammars": grammars})


class Writer:
    """The rules of one grammar as they are made.

    Attributes:
        rules: lines beside the start.
        grammars: Lark texts that the rules refer to as @g0, @g1, ...
    """

    def __init__(self, form: Mapping[str, Any], special: Mapping[str, int], lark: Callable[[str], str]) -> None:
        self.rules: list[str] = []
        self.grammars: list[str] = []
        self._form = form
        self._special = special
        self._ids = frozenset(special.values())
        self._lark = lark
        self._terminals: dict[str, str] = {}

    def write(self, item: Format, border: Border) -> str:
        """An expression for the format and, behind it, one text of its border."""
        expression = regular(item)
        if expression is not None:
            return self._regular(expression, border)
        if isinstance(item, tags.AnyText):
            if item.max_tokens is not None:
                raise _not_served("any_text.max_tokens")
            return self.free(border, item.excludes, 0, item.max_chars)
        if isinstance(item, tags.Sequence | tags.Tag):
            return self._sequence(_flat(item), border)
        if isinstance(item, tags.Or):
            return _either([self.write(element, border) for element in item.elements])
        if isinstance(item, tags.Optional):
            return _either([self.write(item.content, border), self._marks(border)])
        if isinstance(item, tags.Plus | tags.Star | tags.Repeat):
            inner = self.write(item.content, None)
            return self._joined(f"({inner}){_count(item)}" if inner else "", border)
        if isinstance(item, tags.TagsWithSeparator):
            return self._separated(item, border)
        if isinstance(item, tags.TriggeredTags):
            return self._triggered(item, border)
        if isinstance(item, tags.Dispatch):
            return self._dispatch([(pattern, [content]) for pattern, content in item.rules], item, border, item.loop)
        return self._joined(self._value(item), border)

    def free(self, border: Border, excludes: tuple[str, ...] = (), least: int = 0, most: int | None = None) -> str:
        """Free text up to its border, which it does not contain, and the border."""
        if border is None:
            raise GrammarError(
                "structural tag: free text must be followed by a fixed text (a const_string, a tag, its end) or by "
                "nothing (llguidance)"
            )
        texts = tuple(mark for mark in border if isinstance(mark, str))
        tokens = tuple(mark for mark in border if isinstance(mark, Token))
        ways = []
        if texts:
            found = self._rule(f"{self._text(excludes, least, most)} {self._marks(texts)}", lazy=True)
            ways.append(found)
        if tokens:
            ways.append(f"{self._text((*excludes, *texts), least, most)} {self._marks(tokens)}")
        return _either(ways) if ways else self._text(excludes, least, most)

    def json(self, schema: Any) -> str:
        """JSON that fits a schema."""
        if schema is False:
            raise SchemaError("structural tag: the schema allows nothing")
        # A copy: what says nothing is taken out, and patterns are rewritten.
        own = {} if schema is True else msgspec.json.decode(msgspec.json.encode(schema))
        check.check_schema(own, check.LLGUIDANCE, "llguidance")
        check.common_patterns(own)
        return f"%json {json.dumps({**own, 'x-guidance': self._form})}"

    # ---- combinations

    def _sequence(self, parts: list[Part], border: Border) -> str:
        """Formats and fixed texts in a row, from the last to the first: each has to know what follows it."""
        found = ""
        for part in reversed(parts):
            if isinstance(part, tuple):
                if all(mark == "" for mark in part):
                    continue
                if "" in part:
                    # It may be left out, so what follows a free text is not fixed.
                    found = f"({self._marks(part)})? {self._marks(border)} {found}"
                    border = None
                else:
                    found = f"{self._marks(border)} {found}"
                    border = part
            else:
                found = f"{self.write(part, border)} {found}"
                border = None
        return f"{self._marks(border)} {found}".strip()

    def _separated(self, item: tags.TagsWithSeparator, border: Border) -> str:
        # A tag that ends with free text would need to know whether a separator follows.
        one = _either([self.write(tag, None) for tag in item.tags])
        more = "" if item.stop_after_first else f"({self._marks((item.separator,))} {one})*"
        whole = f"{one} {more}".strip()
        return self._joined(whole if item.at_least_one else f"({whole})?", border)

    def _triggered(self, item: tags.TriggeredTags, border: Border) -> str:
        rules: list[tuple[str, list[Format]]] = []
        for trigger in dict.fromkeys(item.triggers):
            bodies: list[Format] = []
            for tag in item.tags:
                begin = tag.begin
                if isinstance(begin, str) and begin.startswith(trigger):
                    bodies.append(tags.Tag(begin[len(trigger) :], tag.content, tag.end))
            if bodies:
                rules.append((trigger, bodies))
        loop = not item.stop_after_first
        if not item.at_least_one:
            return self._dispatch(rules, item, border, loop)
        if not loop:
            return _either([self.write(tag, border) for tag in item.tags])
        first = _either([self.write(tag, None) for tag in item.tags])
        return f"{first} {self._dispatch(rules, item, border, True)}"

    def _dispatch(
        self,
        rules: list[tuple[str, list[Format]]],
        item: tags.TriggeredTags | tags.Dispatch,
        border: Border,
        loop: bool,
    ) -> str:
        """Free text in which each trigger is followed by one of its formats. The first trigger in the text counts."""
        ways = []
        for trigger, bodies in rules:
            opening = self.free((trigger,), item.excludes)
            body = _either([self.write(body, None if loop else border) for body in bodies])
            ways.append(f"{opening} {body}")
        rest = self.free(border, item.excludes)
        return f"({_either(ways)})* {rest}" if loop else _either([*ways, rest])

    # ---- values

    def _value(self, item: Format) -> str:
        if isinstance(item, tags.QwenXml):
            return parameters(item.json_schema, STYLES["qwen_xml"], self)
        if isinstance(item, tags.JsonSchema):
            if item.any_order or item.excludes or item.max_whitespace_cnt is not None:
                raise _not_served("json_schema: any_order, excludes, max_whitespace_cnt")
            if item.style == "json":
                return self.json(item.json_schema)
            if item.style not in STYLES:
                raise GrammarError(
                    f"structural tag: style {item.style[:40]!r} is not served (llguidance); known: "
                    f"json, {', '.join(STYLES)}"
                )
            return parameters(item.json_schema, STYLES[item.style], self)
        if isinstance(item, tags.GrammarText):
            self.grammars.append(self._lark(item.grammar))
            return f"@g{len(self.grammars) - 1}"
        if isinstance(item, Token):
            return self._marks((item,))
        raise _not_served(str(item.__struct_config__.tag))

    def _regular(self, expression: str, border: Border) -> str:
        texts = [mark for mark in border or () if isinstance(mark, str)]
        if len(texts) != len(border or ()):
            return f"{self._terminal(expression)} {self._marks(border)}"
        return self._terminal(expression + (_group(list(map(quoted, texts))) if texts else ""))

    def _joined(self, expression: str, border: Border) -> str:
        return f"{expression} {self._marks(border)}".strip()

    def _marks(self, border: Border) -> str:
        """One of the texts of a border."""
        found = []
        for mark in border or ():
            if isinstance(mark, str):
                found += [_literal(mark)] if mark else []
            else:
                found.append(f"<[{self._token(mark.token)}]>")
        return _either(found)

    def _token(self, token: int | str) -> int:
        found = self._special.get(token) if isinstance(token, str) else token
        if found not in self._ids:
            raise GrammarError(f"structural tag: {token!r} is no special token of this model; write it as a text")
        assert found is not None
        return found

    # ---- rules and terminals

    def _text(self, excludes: tuple[str, ...], least: int, most: int | None) -> str:
        """A terminal of any text that contains none of `excludes`."""
        if max(least, most or 0) > MAX_COUNT:
            raise GrammarError(f"structural tag: a text cannot be counted past {MAX_COUNT} characters")
        count = f"{{{least},{'' if most is None else most}}}" if least or most is not None else "*"
        text = f"/(?s:.){count}/"
        if excludes:
            text += f" & ~/(?s:.)*{_group(list(map(quoted, dict.fromkeys(excludes))))}(?s:.)*/"
        return self._named(text)

    def _terminal(self, expression: str) -> str:
        return self._named(f"/{expression}/") if expression else ""

    def _named(self, body: str) -> str:
        if body not in self._terminals:
            name = self._terminals[body] = f"T{len(self._terminals)}"
            self.rules.append(f"{name}: {body}")
        return self._terminals[body]

    def _rule(self, body: str, lazy: bool) -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name


def regular(item: Format) -> str | None:
    """The format as a regular expression, None if it is something else."""
    if isinstance(item, tags.ConstString):
        return quoted(item.value)
    if isinstance(item, tags.Regex):
        return f"(?:{translated(item.pattern)})"
    if isinstance(item, tags.Sequence | tags.Or):
        parts = [regular(element) for element in item.elements]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        return "".join(known) if isinstance(item, tags.Sequence) else _group(known)
    if isinstance(item, tags.Optional | tags.Plus | tags.Star | tags.Repeat):
        inner = regular(item.content)
        return None if inner is None else f"(?:{inner}){_count(item)}" if inner else ""
    return None


def _flat(item: Format) -> list[Part]:
    """What follows each other in a sequence or a tag: formats, and fixed texts as alternatives. Neighbours that are
    regular are one.
    """
    if isinstance(item, tags.Tag):
        parts: list[Part] = [(item.begin,), *_flat(item.content), item.ends]
    elif isinstance(item, tags.Sequence):
        parts = [part for element in item.elements for part in _flat(element)]
    elif isinstance(item, tags.ConstString):
        return [(item.value,)]
    elif isinstance(item, Token):
        return [(item,)]
    else:
        return [item]
    return _merged(parts)


def _merged(parts: list[Part]) -> list[Part]:
    """Neighbours that are regular made one, with the fixed texts between them."""
    found: list[Part] = []
    run: list[Part] = []  # what is regular, and fixed texts behind it
    for part in parts:
        if _is_regular(part) or (run and _is_regular(run[-1]) and _is_literal(part)):
            run.append(part)
        else:
            found += [*_closed(run), part]
            run = []
    return found + _closed(run)


def _closed(run: list[Part]) -> list[Part]:
    behind = run[-1:] if run and not _is_regular(run[-1]) else []
    body = run[: len(run) - len(behind)]
    return [*(body if len(body) < 2 else [tags.Sequence(tuple(map(_as_format, body)))]), *behind]


def _is_regular(part: Part) -> bool:
    return not isinstance(part, tuple) and regular(part) is not None


def _is_literal(part: Part) -> bool:
    return isinstance(part, tuple) and all(isinstance(mark, str) for mark in part)


def _as_format(part: Part) -> Format:
    if not isinstance(part, tuple):
        return part
    return tags.Or(tuple(tags.ConstString(mark) for mark in part if isinstance(mark, str)))


def _count(item: tags.Optional | tags.Plus | tags.Star | tags.Repeat) -> str:
    if isinstance(item, tags.Repeat):
        if max(item.min, item.max) > MAX_COUNT:
            raise GrammarError(f"structural tag: a format can be repeated {MAX_COUNT} times at most")
        return f"{{{item.min},{'' if item.max == -1 else item.max}}}"
    return "?" if isinstance(item, tags.Optional) else "+" if isinstance(item, tags.Plus) else "*"


def _either(ways: list[str]) -> str:
    """One of some expressions, of which "" is the empty text."""
    some = [way for way in dict.fromkeys(ways) if way]
    if not some:
        return ""
    whole = some[0] if len(some) == 1 == len(ways) else f"({' | '.join(some)})"
    return whole if all(ways) else f"{whole}?"


def _group(expressions: list[str]) -> str:
    return f"(?:{'|'.join(expressions)})"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _not_served(what: str) -> GrammarError:
    return GrammarError(f"structural tag: {what} is not served (llguidance)")
