"""This module owns the formats in which models write tool calls and reasoning: data for `text.parsers.engine`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from radixlm.text.parsers.parts import Arguments, CallObject, Either, Many, Mark, Maybe, Name, Pairs, Part, PythonCall


@dataclass(frozen=True, slots=True)
class Section:
    """A stretch of text that holds calls.

    Attributes:
        open: the marker that begins it; "" for one that needs none and can only begin the text.
        parts: what follows it.
    """

    open: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Tags:
    """Reasoning between two markers."""

    open: str
    close: str


@dataclass(frozen=True, slots=True)
class Channels:
    """A text that is a row of messages, each with a header that says what it is.

    Attributes:
        start, channel: one of them begins a header; the first header's start is in the prompt.
        message: ends the header.
        ends: one of them ends the message.
        header: a whole header, with the groups `channel`, and `first` or `second`: the function that is called.
        kinds: what the messages of a channel are, where not text.
        answer: how an answer begins.
        turn: how reasoning ends and an answer begins.
        longest: characters of a header.
    """

    start: str
    channel: str
    message: str
    ends: tuple[str, ...]
    header: re.Pattern[str]
    kinds: Mapping[str, str]
    answer: str = ""
    turn: str = ""
    longest: int = 512


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models calls tools.

    Attributes:
        words: control words that its markers are made of: they are shown to the parser even where special tokens are
            hidden.
        ids: the form of the ids of calls, which some templates insist on (see `api.protocols.chat`).
        quotes: values tell a text from a number; if not, the functions' schemas must (`Parsing.texts`).
    """

    shape: tuple[Section, ...] | Channels
    words: tuple[str, ...]
    ids: Literal["plain", "short", "numbered"] = "plain"
    quotes: bool = True


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    shape: Tags | Channels

    @property
    def words(self) -> tuple[str, ...]:
        """Control words that its markers are made of."""
        shape = self.shape
        if isinstance(shape, Tags):
            return (shape.open, shape.close)
        return (shape.start, shape.channel, shape.message, *shape.ends, "<|constrain|>")


_HARMONY = Channels(
    start="<|start|>",
    channel="<|channel|>",
    message="<|message|>",
    ends=("<|end|>", "<|call|>", "<|return|>"),
    # <|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>, or with the recipient behind
    # the channel. The start is left out of the first header.
    header=re.compile(
        r"(?:<\|start\|>\w+)?(?: to=functions\.(?P<first>[\w.-]+))?<\|channel\|>(?P<channel>\w+)"
        r"(?: to=functions\.(?P<second>[\w.-]+))?(?: ?(?:<\|constrain\|>)?\w+)?<\|message\|>"
    ),
    kinds={"analysis": "reasoning"},
    answer="<|channel|>final<|message|>",
    turn="<|end|><|start|>assistant<|channel|>final<|message|>",
)

_OBJECT = CallObject()
_OBJECTS = (Mark("["), Many((_OBJECT,), (",",)), Mark("]"))
_PYTHON = (Mark("["), Many((PythonCall(),), (",",)), Maybe((Mark(","),)), Mark("]"))

#: Name -> format of tool calls.
TOOLS: Mapping[str, ToolFormat] = {
    # <tool_call>{"name": "f", "arguments": {}}</tool_call>, also with a list of such objects.
    "hermes": ToolFormat(
        (Section("<tool_call>", (Either((_OBJECTS, (_OBJECT,))), Mark("</tool_call>", final=True))),),
        words=("<tool_call>", "</tool_call>"),
    ),
    # {"name": "f", "parameters": {}}, several with ; or a line break between them, with <|python_tag|> in front or not.
    "llama3": ToolFormat(
        (
            Section("<|python_tag|>", (Many((_OBJECT,), (";", ",", "")),)),
            Section("", (Many((CallObject(leading=("type",)),), (";", ",", "")),)),
        ),
        words=("<|python_tag|>",),
    ),
    # [TOOL_CALLS][{"name": "f", "arguments": {}}]; newer: [TOOL_CALLS]f[ARGS]{}, where an id may precede the arguments.
    "mistral": ToolFormat(
        (
            Section(
                "[TOOL_CALLS]",
                (
                    Either(
                        (
                            _OBJECTS,
                            (_OBJECT,),
                            (Name(), Maybe((Mark("[CALL_ID]"), Name(any=True))), Maybe((Mark("[ARGS]"),)), Arguments()),
                        )
                    ),
                ),
            ),
        ),
        words=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        ids="short",
    ),
    # [f(a=1, b="x"), g()]
    "pythonic": ToolFormat(
        (
            Section("<|python_start|>", (*_PYTHON, Mark("<|python_end|>", final=True))),
            Section("", _PYTHON),
        ),
        words=("<|python_start|>", "<|python_end|>"),
    ),
    # Version 3 puts the type before the name and a code fence around the arguments, version 3.1 neither.
    "deepseek_v3": ToolFormat(
        (
            Section(
                "<｜tool▁calls▁begin｜>",
                (
                    Many(
                        (
                            Mark("<｜tool▁call▁begin｜>"),
                            Either(
                                (
                                    (
                                        Mark("function"),
                                        Mark("<｜tool▁sep｜>"),
                                        Name(),
                                        Mark("```json"),
                                        Arguments(),
                                        Mark("```", final=True),
                                    ),
                                    (Name(), Mark("<｜tool▁sep｜>"), Arguments()),
                                )
                            ),
                            Mark("<｜tool▁call▁end｜>", final=True),
                        )
                    ),
                    Mark("<｜tool▁calls▁end｜>", final=True),
                ),
            ),
        ),
        words=(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>",
        ),
    ),
    # <tool_call>f, then <arg_key>a</arg_key><arg_value>1</arg_value> for each argument.
    "glm": ToolFormat(
        (
            Section(
                "<tool_call>",
                (Name(), Pairs(("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"), "</tool_call>")),
            ),
        ),
        words=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        quotes=False,
    ),
    # <tool_call><function=f><parameter=a>1</parameter></function></tool_call>; the outer tags may be missing.
    "qwen3_coder": ToolFormat(
        (
            Section(
                "<tool_call>",
                (
                    Mark("<function="),
                    Name(),
                    Mark(">"),
                    Pairs(("<parameter=", ">"), ("", "</parameter>"), "</function>", trim=True),
                    Mark("</tool_call>", final=True),
                ),
            ),
            Section(
                "<function=",
                (Name(), Mark(">"), Pairs(("<parameter=", ">"), ("", "</parameter>"), "</function>", trim=True)),
            ),
        ),
        words=("<tool_call>", "</tool_call>"),
        quotes=False,
    ),
    # The name stands as functions.f:0, with the number of the call.
    "kimi_k2": ToolFormat(
        (
            Section(
                "<|tool_calls_section_begin|>",
                (
                    Many(
                        (
                            Mark("<|tool_call_begin|>"),
                            Name(prefix=r"(?:functions\.)?", suffix=r"(?::\d+)?"),
                            Mark("<|tool_call_argument_begin|>"),
                            Arguments(),
                            Mark("<|tool_call_end|>", final=True),
                        )
                    ),
                    Mark("<|tool_calls_section_end|>", final=True),
                ),
            ),
        ),
        words=(
            "<|tool_calls_section_begin|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "<|tool_calls_section_end|>",
        ),
        ids="numbered",
    ),
    # <|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>
    "gpt-oss": ToolFormat(_HARMONY, words=ReasoningFormat(_HARMONY).words),
}

#: Name -> format of reasoning.
REASONING: Mapping[str, ReasoningFormat] = {
    "think": ReasoningFormat(Tags("<think>", "</think>")),
    "mistral": ReasoningFormat(Tags("[THINK]", "[/THINK]")),
    "kimi": ReasoningFormat(Tags("◁think▷", "◁/think▷")),
    "gpt-oss": ReasoningFormat(_HARMONY),
}

#: Names that people know a format by.
TOOL_SYNONYMS: Mapping[str, str] = {
    "qwen": "hermes", "qwen25": "hermes", "qwen2.5": "hermes", "qwen3": "hermes", "smollm": "hermes",
    "llama3_json": "llama3", "llama31": "llama3",
    "llama4_pythonic": "pythonic", "llama4": "pythonic",
    "deepseekv3": "deepseek_v3", "deepseekv31": "deepseek_v3", "deepseek_v31": "deepseek_v3",
    "glm45": "glm", "glm47": "glm",
    "kimi": "kimi_k2", "gpt_oss": "gpt-oss", "harmony": "gpt-oss", "openai": "gpt-oss", "qwen3_xml": "qwen3_coder",
}  # fmt: skip
REASONING_SYNONYMS: Mapping[str, str] = {
    "deepseek-r1": "think", "deepseek_r1": "think", "deepseek-v3": "think", "deepseek_v3": "think",
    "qwen3": "think", "qwen3-thinking": "think", "glm45": "think", "glm47": "think", "kimi_k2": "think",
    "step3": "think", "nemotron_3": "think", "minimax": "think", "mimo": "think", "interns1": "think",
    "magistral": "mistral", "gpt_oss": "gpt-oss", "harmony": "gpt-oss",
}  # fmt: skip
