"""Parsers of tool calls and reasoning: any cut of the text gives the same pieces, and nothing is lost or said twice."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixlm.base.errors import BadRequest
from radixlm.base.pieces import Piece, joined
from radixlm.base.request import Parsing
from radixlm.text.parsers.engine import Parser, parse
from radixlm.text.parsers.formats import REASONING, TOOLS, Tags
from radixlm.text.parsers.reader import SPACE

Json = dict[str, Any]
Calls = Sequence[tuple[str, Json]]

NAMES = ("f", "get_weather", "a-b")


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def literal(value: Any) -> str:
    """As Python writes it."""
    return repr(value)


def _hermes(calls: Calls) -> str:
    return "\n".join(f'<tool_call>\n{{"name": "{n}", "arguments": {dumps(a)}}}\n</tool_call>' for n, a in calls)


def _hermes_list(calls: Calls) -> str:
    return f"<tool_call>{dumps([{'name': n, 'arguments': a} for n, a in calls])}</tool_call>"


def _hermes_reversed(calls: Calls) -> str:
    return "".join(
        f'<tool_call>{{"arguments": {dumps(a)}, "id": [1, "x"], "name": "{n}"}}</tool_call>' for n, a in calls
    )


def _llama3(calls: Calls) -> str:
    return "; ".join(f'{{"name": "{n}", "parameters": {dumps(a)}}}' for n, a in calls)


def _mistral(calls: Calls) -> str:
    return "[TOOL_CALLS] " + dumps([{"name": n, "arguments": a} for n, a in calls])


def _mistral_new(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{n}[CALL_ID]a1B2c3D4e[ARGS]{dumps(a)}" for n, a in calls)


def _pythonic(calls: Calls) -> str:
    return "[" + ", ".join(f"{n}({', '.join(f'{k}={literal(v)}' for k, v in a.items())})" for n, a in calls) + "]"


def _deepseek_v3(calls: Calls) -> str:
    parts = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{dumps(a)}\n```<｜tool▁call▁end｜>" for n, a in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(parts) + "<｜tool▁calls▁end｜>"


def _deepseek_v31(calls: Calls) -> str:
    parts = [f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{dumps(a)}<｜tool▁call▁end｜>" for n, a in calls]
    return "<｜tool▁calls▁begin｜>" + "".join(parts) + "<｜tool▁calls▁end｜>"


def _bare(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def _glm(calls: Calls) -> str:
    return "\n".join(
        f"<tool_call>{n}\n"
        + "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{_bare(v)}</arg_value>\n" for k, v in a.items())
        + "</tool_call>"
        for n, a in calls
    )


def _qwen3_coder(calls: Calls) -> str:
    return "\n".join(
        f"<tool_call>\n<function={n}>\n"
        + "".join(f"<parameter={k}>\n{_bare(v)}\n</parameter>\n" for k, v in a.items())
        + "</function>\n</tool_call>"
        for n, a in calls
    )


def _kimi(calls: Calls) -> str:
    parts = [
        f"<|tool_call_begin|>functions.{n}:{i}<|tool_call_argument_begin|>{dumps(a)}<|tool_call_end|>"
        for i, (n, a) in enumerate(calls)
    ]
    return "<|tool_calls_section_begin|>" + "".join(parts) + "<|tool_calls_section_end|>"


def _harmony(calls: Calls) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{dumps(a)}<|call|>" for n, a in calls
    )


def _harmony_role(calls: Calls) -> str:
    return "".join(
        f"<|start|>assistant to=functions.{n}<|channel|>commentary json<|message|>{dumps(a)}<|call|>" for n, a in calls
    )


#: (format, how a model writes calls in it)
WRITERS: dict[str, tuple[str, Callable[[Calls], str]]] = {
    "hermes": ("hermes", _hermes), "hermes list": ("hermes", _hermes_list),
    "hermes reversed": ("hermes", _hermes_reversed), "llama3": ("llama3", _llama3),
    "llama3 tagged": ("llama3", lambda calls: "<|python_tag|>" + _llama3(calls)),
    "llama3 lines": ("llama3", lambda calls: "\n".join(_llama3([call]) for call in calls)),
    "mistral": ("mistral", _mistral), "mistral new": ("mistral", _mistral_new),
    "pythonic": ("pythonic", _pythonic),
    "pythonic tagged": ("pythonic", lambda calls: f"<|python_start|>{_pythonic(calls)}<|python_end|>"),
    "deepseek v3": ("deepseek_v3", _deepseek_v3), "deepseek v3.1": ("deepseek_v3", _deepseek_v31),
    "glm": ("glm", _glm), "qwen3 coder": ("qwen3_coder", _qwen3_coder), "kimi": ("kimi_k2", _kimi),
    "harmony": ("gpt-oss", _harmony), "harmony role": ("gpt-oss", _harmony_role),
}  # fmt: skip

#: Formats whose values stand without quotes: they cannot hold every text.
UNQUOTED = ("glm", "qwen3_coder")


def chunks(text: str, seed: int) -> Iterator[str]:
    """The text cut at random places; seed 0: into characters."""
    source = random.Random(seed)
    begin = 0
    while begin < len(text):
        size = 1 if seed == 0 else source.choice((0, 1, 1, 2, 3, 7, 40))
        yield text[begin : begin + size]
        begin += size


def parse_chunks(text: str, parsing: Parsing, seed: int) -> list[Piece]:
    parser = Parser(parsing)
    pieces: list[Piece] = []
    for chunk in chunks(text, seed):
        pieces += parser.feed(chunk)
    return joined([*pieces, *parser.finish()])


def parsed(text: str, parsing: Parsing, seeds: Sequence[int] = (0, 1, 2, 3)) -> list[Piece]:
    """The pieces of a text, the same for every cut of it."""
    whole = parse(text, parsing)
    for seed in seeds:
        assert parse_chunks(text, parsing, seed) == whole, seed
    return whole


def texts_of(pieces: Sequence[Piece], kind: str) -> str:
    return "".join(piece.text for piece in pieces if piece.kind == kind)


def calls_of(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    """(function, arguments) of every call. Their numbers must count up from 0."""
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        if piece.kind == "call":
            assert piece.call == len(calls)
            calls.append((piece.text, ""))
        elif piece.kind == "arguments":
            assert piece.call == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
    return calls


words = st.text(alphabet="ab <>[]{}\"'\\/\n,:=é漢🙂|", max_size=12)
scalars = st.none() | st.booleans() | st.integers(-(10**18), 10**18) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    scalars | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
keys = st.sampled_from(["a", "city", "is_on", "x1"])


@st.composite
def calls(draw: st.DrawFn, unquoted: bool) -> Calls:
    made = []
    for _ in range(draw(st.integers(1, 3))):
        inner = draw(st.dictionaries(keys, values, max_size=3))
        if unquoted:
            inner = {key: value for key, value in inner.items() if not isinstance(value, str)}
            inner |= draw(st.dictionaries(st.sampled_from(["text", "t"]), words, max_size=2))
        made.append((draw(st.sampled_from(NAMES)), inner))
    return made


@pytest.mark.parametrize("writer", WRITERS)
@settings(max_examples=25)
@given(data=st.data(), before=st.sampled_from(["", "I look.", "a < b [1]\n"]), after=st.sampled_from(["", " x <b>"]))
def test_what_a_model_writes_is_what_comes_out(writer: str, data: st.DataObject, before: str, after: str) -> None:
    name, write = WRITERS[writer]
    asked = data.draw(calls(unquoted=name in UNQUOTED))
    if writer in ("pythonic", "llama3", "llama3 lines"):
        before = ""  # without a marker a call begins the text
    if name == "gpt-oss":
        before, after = "", ""
    texts = tuple((function, key) for function in NAMES for key in ("text", "t")) if name in UNQUOTED else ()
    pieces = parsed(before + write(asked) + after, Parsing(tools=name, names=NAMES, texts=texts))
    found = calls_of(pieces)
    assert [call for call, _ in found] == [call for call, _ in asked]
    assert [json.loads(arguments) for _, arguments in found] == [given_ for _, given_ in asked]
    assert texts_of(pieces, "text") == before.rstrip() + after.lstrip()


def beginning(text: str) -> bool:
    """Whether something could be added that makes it a JSON object."""
    closing: list[str] = []
    string = escaped = False
    for char in text:
        if escaped:
            escaped = False
        elif string:
            escaped, string = char == "\\", char != '"'
        elif char == '"':
            string = True
        elif char in "{[":
            closing.append("}" if char == "{" else "]")
        elif char in "}]":
            closing.pop()
    return any(_loads(text + more + "".join(reversed(closing))) for more in ENDINGS)


#: What a value, a key or a part of either may lack.
ENDINGS = [
    more + after
    for more in (
        "",
        '"',
        'n"',
        '0000"',
        '000"',
        '00"',
        '0"',
        "0",
        "rue",
        "ue",
        "e",
        "alse",
        "lse",
        "se",
        "ull",
        "ll",
        "l",
    )
    for after in ("", ": 0")
] + ['"a": 0', "0"]


def _loads(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


@pytest.mark.parametrize("writer", WRITERS)
@settings(max_examples=40)
@given(data=st.data())
def test_damaged_calls(writer: str, data: st.DataObject) -> None:
    """Texts of that kind with something missing, doubled or put in: no cut matters, no text is lost."""
    name, write = WRITERS[writer]
    text = write(data.draw(calls(unquoted=name in UNQUOTED)))
    for _ in range(data.draw(st.integers(1, 3))):
        begin = data.draw(st.integers(0, len(text)))
        end = min(len(text), begin + data.draw(st.sampled_from([0, 0, 1, 2, 9])))
        middle = data.draw(
            st.sampled_from(["", text[begin:end] * 2, "<", "]", "}", '"', " ", "\n", "x", "<tool_call>"])
        )
        text = text[:begin] + middle + text[end:]
    text = text[: data.draw(st.integers(0, len(text)))] if data.draw(st.booleans()) else text
    pieces = parsed(text, Parsing(tools=name, names=NAMES, texts=(("f", "text"),)))
    found = calls_of(pieces)
    for call, arguments in found:
        assert call in NAMES
        assert arguments == "" or beginning(arguments), arguments
    if not found and name != "gpt-oss":
        assert texts_of(pieces, "text") == text
    rest = iter(text)
    assert all(char in rest for char in texts_of(pieces, "text")), (
        "text that the model did not write, or in another order"
    )


@pytest.mark.parametrize("name", [name for name in REASONING if name != "gpt-oss"])
@settings(max_examples=40)
@given(
    thought=st.text(alphabet="ab <[/]>\n", max_size=20),
    answer=st.text(alphabet="ab <[/]>\n", max_size=20),
    thinking=st.booleans(),
    again=st.booleans(),
    closed=st.booleans(),
)
def test_reasoning(name: str, thought: str, answer: str, thinking: bool, again: bool, closed: bool) -> None:
    tags = REASONING[name].shape
    assert isinstance(tags, Tags)
    text = ("" if thinking and not again else tags.open) + thought + (tags.close + answer if closed else "")
    pieces = parsed(text, Parsing(reasoning=name, thinking=thinking))
    strip = SPACE if closed else ""
    assert texts_of(pieces, "reasoning") == thought.lstrip(SPACE).rstrip(strip)
    assert texts_of(pieces, "text") == (answer.lstrip(SPACE) if closed else "")


def test_reasoning_is_looked_for_at_the_start_alone() -> None:
    text = " The tag <think> begins, </think> ends it."
    assert parsed(text, Parsing(reasoning="think")) == [Piece("text", text)]


def test_reasoning_before_a_call() -> None:
    text = '<think>\nwhy <tool_call>{"name": "f"}</tool_call>\n</think>\n\n<tool_call>{"name": "f"}</tool_call>\n'
    assert parsed(text, Parsing(tools="hermes", reasoning="think", names=NAMES)) == [
        Piece("reasoning", 'why <tool_call>{"name": "f"}</tool_call>'),
        Piece("call", "f"),
        Piece("arguments", "{}"),
    ]


def test_channels() -> None:
    text = (
        "<|channel|>analysis<|message|>They ask < 3.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
        "<|start|>assistant<|channel|>final<|message|>a <b> |c"
    )
    both = parsed(text, Parsing(tools="gpt-oss", reasoning="gpt-oss", names=NAMES))
    assert both == [
        Piece("reasoning", "They ask < 3."),
        Piece("text", "I look."),
        Piece("call", "f"),
        Piece("arguments", '{"a": 1}'),
        Piece("text", "a <b> |c"),
    ]
    assert parsed(text, Parsing(tools="gpt-oss", names=NAMES))[0] == Piece("text", "They ask < 3.I look.")
    without = parsed(text, Parsing(reasoning="gpt-oss"))
    assert [piece.kind for piece in without] == ["reasoning", "text"] and '{"a": 1}' in without[1].text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "unknown", "arguments": {"a": 1}}</tool_call> and more'),
        ("hermes", "a < b, <tool_call> is a tag\n\n"),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call><tool_call>{"name": 1}</tool_call>'),
        ("llama3", '{"title": "JSON that is an answer", "name": "f"}'),
        ("llama3", '  {"name": "unknown", "parameters": {}}'),
        ("mistral", "[TOOL_CALLS]unknown[ARGS]{}"),
        ("pythonic", "[1, 2]"),
        ("pythonic", "[unknown(a=1)]"),
        ("pythonic", "[f"),
        ("glm", "<tool_call>unknown\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"),
        ("qwen3_coder", "<function=unknown>\n<parameter=a>\n1\n</parameter>\n</function>"),
        ("kimi_k2", "<|tool_calls_section_begin|> nothing <|tool_calls_section_end|>"),
        ("gpt-oss", "<|channel|>commentary to=functions.unknown <|constrain|>json<|message|>{}<|call|>"),
        ("gpt-oss", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>no JSON<|call|>"),
        ("gpt-oss", "no header at all"),
    ],
)
def test_what_is_no_call_is_text(name: str, text: str) -> None:
    assert parsed(text, Parsing(tools=name, names=NAMES)) == [Piece("text", text)]


def test_a_call_that_breaks_off_ends_where_it_was_json() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1,, "b": 2}}</tool_call><tool_call>{"name": "f"}</tool_call>'
    assert parsed(text, Parsing(tools="hermes", names=NAMES)) == [
        Piece("call", "f"),
        Piece("arguments", '{"a": 1,'),
        Piece("text", ', "b": 2}}</tool_call>'),
        Piece("call", "f", 1),
        Piece("arguments", "{}", 1),
    ]


def test_arguments_come_as_the_model_writes_them() -> None:
    parser = Parser(Parsing(tools="hermes", names=NAMES))
    assert parser.feed('<tool_call>\n{"name": "f", "argu') == []
    assert parser.feed('ments": {"city": "Pa') == [Piece("call", "f"), Piece("arguments", '{"city": "Pa')]
    assert parser.feed('ris\nx"') == [Piece("arguments", 'ris\\nx"')]
    assert parser.feed("}}\n</tool_") == [Piece("arguments", "}")]
    assert parser.finish() == []


def test_values_without_quotes_wait_until_they_are_known() -> None:
    parser = Parser(Parsing(tools="glm", names=NAMES, texts=(("f", "text"),)))
    assert parser.feed("<tool_call>f\n<arg_key>") == [Piece("call", "f")]
    assert parser.feed("a</arg_key>\n<arg_value>12") == [Piece("arguments", '{"a": ')]
    assert parser.feed("3</arg_value>") == [Piece("arguments", "123")]
    assert parser.feed("<arg_key>text</arg_key>\n<arg_value>12") == [Piece("arguments", ', "text": "12')]
    assert parser.feed("</arg_value></tool_call>") == [Piece("arguments", '"}')]


def test_thinking_is_told() -> None:
    parser = Parser(Parsing(reasoning="think", thinking=True))
    assert parser.thinking
    parser.feed("hm</thi")
    assert parser.thinking
    parser.feed("nk>")
    assert not parser.thinking
    assert not Parser(Parsing(reasoning="think")).thinking


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(BadRequest, match="hermes"):
        Parser(Parsing(tools="nope"))
    with pytest.raises(BadRequest, match="think"):
        Parser(Parsing(reasoning="nope"))


@pytest.mark.parametrize("name", TOOLS)
def test_long_runs_cost_little(name: str) -> None:
    """Text that keeps looking like a marker is read once, not again and again."""
    for text in (
        " " * 50_000,
        "<" * 50_000,
        "[" * 50_000,
        "{" * 50_000,
        "<tool_call>{" * 5_000,
        "[TOOL_CALLS][" * 5_000,
    ):
        begun = time.process_time()
        assert texts_of(parse(text, Parsing(tools=name, names=NAMES)), "text") == text
        assert time.process_time() - begun < 5.0
