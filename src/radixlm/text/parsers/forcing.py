"""This module owns grammars that force tool calls: every format as a model writes it, with arguments that fit a schema.

They are written in llguidance's dialect of Lark: `%json` stands for the JSON of a schema, `<[id]>` for a special token,
which no text can be mistaken for. What a grammar lets through, `text.parsers.engine` reads as a call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from radixlm.base.errors import BadRequest
from radixlm.grammar.check import LLGUIDANCE, check_schema
from radixlm.text.words import alternation

Json = dict[str, Any]

#: The library that knows the dialect.
BACKEND = "llguidance"

#: How arguments are written: one form, so that no white space runs for ever and most of a frame is forced. And nothing
#: of a schema is passed over.
_FORM = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "lenient": False,
    "coerce_one_of": False,
}

#: Text between calls, or before the first.
_FREE = r"/(.|\n)*/"


@dataclass(frozen=True, slots=True)
class Function:
    """A function that may be called.

    Attributes:
        parameters: the JSON schema of its arguments, None if it has none.
        strict: arguments must fit the schema even where the call is not forced.
    """

    name: str
    parameters: Json | None = None
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Writing:
    """How a format writes calls. `{name}` stands for the function.

    Attributes:
        open: the marker that begins a section of calls; "" for one that begins the text, with `first` as its first
            character.
        begin, end: around all calls of a section.
        before, after: around the arguments of one call.
        between: between two calls; None: there is one call only.
        pairs: arguments are not JSON: what stands before a value, around its parameter `{key}`, and after it.
        lead: what may precede the calls although only calls are wanted. `{free}` stands for any text.
        answer: how an answer that is no call is written, where that has a form too.
    """

    open: str
    before: str
    after: str
    begin: str = ""
    end: str = ""
    between: str | None = ""
    first: str = ""
    pairs: Pairs | None = None
    lead: str = ""
    answer: str = ""


@dataclass(frozen=True, slots=True)
class Pairs:
    """
    Attributes:
        before, after: around a value. `{key}` stands for the parameter.
        between: between two of them.
        text: a regular expression of values that are texts, with `{count}` for how long they are, and what stands after
            them; None: they are JSON strings.
    """

    before: str
    after: str
    between: str = ""
    text: tuple[str, str] | None = None


_NAMED = '{"name": "{name}", "arguments": '

#: (format, older form) -> how it is written.
WRITINGS: Mapping[tuple[str, bool], Writing] = {
    ("hermes", False): Writing("<tool_call>", "<tool_call>\n" + _NAMED, "}\n</tool_call>", between="\n"),
    ("llama3", False): Writing("", '{"name": "{name}", "parameters": ', "}", between="; ", first="{"),
    ("mistral", False): Writing("[TOOL_CALLS]", "[TOOL_CALLS]{name}[ARGS]", ""),
    ("mistral", True): Writing("[TOOL_CALLS]", _NAMED, "}", begin="[TOOL_CALLS] [", between=", ", end="]"),
    ("pythonic", False): Writing(
        "", "{name}(", ")", begin="[", between=", ", end="]", first="[", pairs=Pairs("{key}=", "", ", ")
    ),
    ("deepseek_v3", False): Writing(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        begin="<｜tool▁calls▁begin｜>",
        end="<｜tool▁calls▁end｜>",
    ),
    ("deepseek_v3", True): Writing(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        begin="<｜tool▁calls▁begin｜>",
        between="\n",
        end="<｜tool▁calls▁end｜>",
    ),
    ("glm", False): Writing(
        "<tool_call>",
        "<tool_call>{name}\n",
        "</tool_call>",
        between="\n",
        pairs=Pairs(
            "<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n", text=("/[^<]{count}/", "</arg_value>\n")
        ),
    ),
    ("qwen3_coder", False): Writing(
        "<tool_call>",
        "<tool_call>\n<function={name}>\n",
        "</function>\n</tool_call>",
        between="\n",
        pairs=Pairs("<parameter={key}>\n", "\n</parameter>\n", text=(r"/[^<]{count}\n/", "</parameter>\n")),
    ),
    ("kimi_k2", False): Writing(
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        begin="<|tool_calls_section_begin|>",
        end="<|tool_calls_section_end|>",
    ),
    ("gpt-oss", False): Writing(
        "<|channel|>commentary to=",
        "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
        "",
        between=None,
        lead="<|channel|>analysis<|message|>{free}<|end|><|start|>assistant",
        answer="<|channel|>final<|message|>{free}",
    ),
}


def required(writing: Writing, functions: Sequence[Function], parallel: bool, special: Mapping[str, int]) -> str:
    """A grammar of calls and nothing else.

    Args:
        parallel: more than one call is allowed.
        special: the special tokens among the format's control words, by text.

    Raises:
        BadRequest: a schema that cannot be the schema of arguments.
    """
    rules = _Rules(writing, special)
    section = rules.section(functions, parallel, writing.begin)
    return rules.grammar(f"({rules.text(writing.lead)})? {section}" if writing.lead else section)


def triggered(writing: Writing, functions: Sequence[Function], parallel: bool, special: Mapping[str, int]) -> str:
    """A grammar of any text in which a marker that begins a call is followed by one. Arguments are as `required`."""
    rules = _Rules(writing, special)
    if writing.answer:
        section = rules.section(functions, parallel, writing.begin)
        return rules.grammar(f"({rules.text(writing.lead)})* ({section} | {rules.text(writing.answer)})")
    if not writing.open:
        section = rules.section(functions, parallel, writing.begin)
        return rules.grammar(f'{section} | /[^\\{writing.first}](.|\\n)*/ | ""')
    body = rules.section(functions, parallel and bool(writing.begin), writing.begin, writing.open)
    start = f"(trigger {body})* {_FREE}" if parallel else f"trigger {body} | {_FREE}"
    return rules.grammar(start, trigger=True)


def either(
    writing: Writing, functions: Sequence[Function], parallel: bool, special: Mapping[str, int], schema: Any
) -> str:
    """A grammar of calls, or of an answer that is the JSON of a schema. Arguments are as `required`."""
    rules = _Rules(writing, special)
    section = rules.section(functions, parallel, writing.begin)
    if not writing.answer:
        return rules.grammar(f"{section} | {_json(schema)}")
    answer = rules.text(writing.answer.replace("{free}", ""))
    return rules.grammar(f"({rules.text(writing.lead)})* ({section} | {answer} {_json(schema)})")


class _Rules:
    """Rules of one grammar, as they are made."""

    def __init__(self, writing: Writing, special: Mapping[str, int]) -> None:
        self._writing = writing
        self._special = special
        self._words = alternation(special)
        self._rules: list[str] = []

    def grammar(self, start: str, trigger: bool = False) -> str:
        lines = ["%llguidance {}", f"start: {start}"]
        if trigger:
            token = self._special.get(self._writing.open)
            if token is None:
                lines.append(f"trigger[lazy]: {_FREE} {_quoted(self._writing.open)}")
            else:
                lines.append(f"trigger: {_FREE} <[{token}]>")
        return "\n".join([*lines, *self._rules]) + "\n"

    def text(self, text: str) -> str:
        """Fixed text, with its special tokens as such. `{free}` stands for any text."""
        parts = []
        at = 0
        for found in [*self._words.finditer(text), None]:
            plain = text[at : found.start() if found is not None else len(text)]
            for place, run in enumerate(plain.split("{free}")):
                parts += [_FREE] if place else []
                parts += [_quoted(run)] if run else []
            if found is not None:
                parts.append(f"<[{self._special[found[0]]}]>")
                at = found.end()
        return " ".join(parts)

    def section(self, functions: Sequence[Function], parallel: bool, begin: str, left_out: str = "") -> str:
        """The calls of a section. `left_out`: what it begins with is there already."""
        writing = self._writing
        one = self._one_of(functions, "" if begin else left_out)
        parts = [self.text(begin.removeprefix(left_out)), one]
        if parallel and writing.between is not None:
            parts.append(f"({self.text(writing.between)} {one})*")
        parts.append(self.text(writing.end))
        return " ".join(part for part in parts if part)

    def _one_of(self, functions: Sequence[Function], left_out: str) -> str:
        names = []
        seen: set[str] = set()
        for function in functions:
            key = f"{function.name} {json.dumps(function.parameters)}"
            if key in seen:
                continue
            seen.add(key)
            name = f"call_{len(self._rules)}"
            names.append(name)
            before = self._writing.before.replace("{name}", function.name).removeprefix(left_out)
            body = [self.text(before), self._arguments(function), self.text(self._writing.after)]
            self._rules.append(f"{name}: " + " ".join(part for part in body if part))
        return names[0] if len(names) == 1 else f"({' | '.join(names)})"

    def _arguments(self, function: Function) -> str:
        schema = object_schema(function)
        pairs = self._writing.pairs
        if pairs is None:
            return _json(schema)
        return self._pairs(pairs, schema)

    def _pairs(self, pairs: Pairs, schema: Json) -> str:
        """Parameters in the order of the schema. Those that are not required may be left out."""
        shared: Json = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        needed = set(schema.get("required") or ())
        written: list[tuple[str, bool]] = []
        for key, value in (schema.get("properties") or {}).items():
            before = self.text(pairs.before.replace("{key}", key))
            written.append((f"{before} {self._value(pairs, value, shared)}", key in needed))
        if not pairs.between:
            return " ".join(part if must else f"({part})?" for part, must in written)
        return self._separated(written, self.text(pairs.between))

    def _separated(self, written: Sequence[tuple[str, bool]], between: str) -> str:
        """Each part that is there is separated from the one before: one alternative for each that may be the first."""
        tails = [f"({between} {part})" + ("" if must else "?") for part, must in written]
        choices = []
        for place, (part, must) in enumerate(written):
            choices.append(" ".join([part, *tails[place + 1 :]]))
            if must:
                break
        else:
            choices.append('""')
        return f"({' | '.join(choices)})"

    def _value(self, pairs: Pairs, schema: Any, shared: Json) -> str:
        """A value and what stands after it."""
        after = self.text(pairs.after)
        if pairs.text is None or not is_text(schema):
            return f"{_json({**schema, **shared} if isinstance(schema, dict) else schema)} {after}"
        choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if choices is not None:
            return f"({' | '.join(map(_quoted, choices))}) {after}"
        expression, after_text = pairs.text
        return f"{expression.replace('{count}', _count(schema))} {self.text(after_text)}"


def object_schema(function: Function) -> Json:
    """The schema of a function's arguments, as far as it can be enforced.

    What it does not say is not added: a function without parameters has none. What cannot be enforced is left open,
    unless the function is strict.

    Raises:
        BadRequest: it is the schema of something else, or one of a strict function that cannot be enforced.
    """
    schema = {key: value for key, value in (function.parameters or {}).items() if value is not None}
    where = f"the parameters of the tool {function.name[:80]!r}"
    if schema.setdefault("type", "object") != "object":
        raise BadRequest(f"{where} must be a schema of type object", param="tools")
    if not _COMPOSED & schema.keys():
        schema.setdefault("properties", {})
        schema.setdefault("additionalProperties", False)
    reason = _objection(schema)
    if reason is None:
        return schema
    if function.strict:
        raise BadRequest(f"{where}: {reason}", param="tools")
    return _loosened(schema)


def _loosened(schema: Json) -> Json:
    """The schema without what cannot be enforced: some of its properties may be anything, or all of it."""
    properties = schema.get("properties")
    kept = {key: value for key, value in schema.items() if key in _FRAME}
    if isinstance(properties, dict):
        shared = {key: value for key, value in schema.items() if key in ("$defs", "definitions")}
        kept["properties"] = {
            key: value if _objection({"properties": {key: value}, **shared}) is None else {}
            for key, value in properties.items()
        }
    return kept if _objection(kept) is None else {"type": "object"}


def _objection(schema: Json) -> str | None:
    """Why a schema cannot be enforced, if it cannot."""
    return _objection_to(json.dumps(schema))


@lru_cache(maxsize=4096)
def _objection_to(text: str) -> str | None:
    import llguidance  # only where calls are forced

    try:
        check_schema(json.loads(text), LLGUIDANCE, "llguidance")
        grammar = llguidance.LLMatcher.grammar_from_json_schema(text)
        reason: str = llguidance.LLMatcher.validate_grammar(grammar)
    except (ValueError, BadRequest) as error:
        reason = str(error)
    return " ".join(reason.split())[:_LONGEST_REASON] or None


#: Longest part of the library's reasons that a client is shown.
_LONGEST_REASON = 200

#: What is kept of a schema that is loosened, beside its properties.
_FRAME = ("type", "required", "additionalProperties", "$defs", "definitions")

#: Keywords with which properties may come from elsewhere than `properties`.
_COMPOSED = frozenset({"$ref", "allOf", "anyOf", "oneOf", "patternProperties", "enum", "const", "if", "not"})


def is_text(schema: Any) -> bool:
    """Every value that fits the schema is a text."""
    if not isinstance(schema, Mapping):
        return False
    if isinstance(schema.get("enum"), list):
        return bool(schema["enum"]) and all(isinstance(value, str) for value in schema["enum"])
    if "const" in schema:
        return isinstance(schema["const"], str)
    return schema.get("type") in ("string", ["string"])


def _count(schema: Json) -> str:
    """How many characters a text may have, as a repeat. Long ones are not counted: each step would be a state."""
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if not isinstance(least, int) or least > _LONGEST_COUNT:
        return "*"
    if not isinstance(most, int) or most > _LONGEST_COUNT:
        return f"{{{least},}}" if least else "*"
    return f"{{{least},{max(least, most)}}}"


_LONGEST_COUNT = 1000


def _json(schema: Any) -> str:
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": _FORM}
    return f"%json {json.dumps(schema)}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
