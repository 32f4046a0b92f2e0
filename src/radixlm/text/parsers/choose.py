"""This module owns which formats of tool calls and reasoning belong to a model: its chat template tells. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from radixlm.base.errors import StartupError
from radixlm.text.parsers.formats import REASONING, REASONING_SYNONYMS, TOOL_SYNONYMS, TOOLS

#: What users say for no parser at all.
NONE = "none"

#: (words that all stand in the template, format). The first that fits counts: markers of one family are used by others.
_TOOL_SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>", "functions."), "gpt-oss"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v3"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<arg_key>",), "glm"),
    (("<function=",), "qwen3_coder"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<tool_call>",), "hermes"),
    (("<|python_start|>",), "pythonic"),
    (("[func_name1(",), "pythonic"),
    (("<|python_tag|>",), "llama3"),
    (('"parameters": dictionary of argument name',), "llama3"),
)
_REASONING_SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>analysis",), "gpt-oss"),
    (("<|channel|>", "<|message|>"), "gpt-oss"),
    (("[THINK]",), "mistral"),
    (("◁think▷",), "kimi"),
    (("<think>",), "think"),
    (("</think>",), "think"),
)

#: For templates that show no format: what most models were trained on.
_USUAL = "hermes"


@dataclass(frozen=True, slots=True)
class Formats:
    """
    Attributes:
        tools, reasoning: names of formats, "" for none.
        native: the model was trained to reason, its template says.
        older: this model writes the older of two forms of its format of calls, which are parsed alike.
        reasons: option -> why its format was chosen.
    """

    tools: str = _USUAL
    reasoning: str = ""
    native: bool = False
    older: bool = False
    reasons: Mapping[str, str] = field(default_factory=dict)


def choose(template: str, tools: str | None = None, reasoning: str | None = None) -> Formats:
    """
    Args:
        template: the source of the chat template; of all of them, if there are several.
        tools, reasoning: a format that the operator names, or `none`; None: by the template.

    Raises:
        StartupError: there is no format of that name.
    """
    reasons: dict[str, str] = {}
    if tools is not None:
        chosen = tools_named(tools, "--tool-call-parser")
        reasons["tool_call_parser"] = "named by the operator"
    else:
        chosen, reasons["tool_call_parser"] = _by_signs(template, _TOOL_SIGNS)
        if not chosen:
            chosen, reasons["tool_call_parser"] = _USUAL, "the chat template shows no format of calls; the usual one"
    by_template, why = _by_signs(template, _REASONING_SIGNS)
    if reasoning is not None:
        thought = reasoning_named(reasoning, "--reasoning-parser")
        reasons["reasoning_parser"] = "named by the operator"
    else:
        thought, reasons["reasoning_parser"] = by_template, why or "the chat template knows no reasoning"
    older = (chosen == "mistral" and "[ARGS]" not in template) or (chosen == "deepseek_v3" and "```json" in template)
    return Formats(chosen, thought, bool(thought) and thought == by_template, older, reasons)


def _by_signs(template: str, signs: tuple[tuple[tuple[str, ...], str], ...]) -> tuple[str, str]:
    for words, name in signs:
        if all(word in template for word in words):
            return name, f"the chat template has {words[0]}"
    return "", ""


def tools_named(name: str, option: str) -> str:
    """The format of tool calls that goes by a name, "" for `none`. Raises `StartupError` if there is none."""
    return _named(name, TOOLS, TOOL_SYNONYMS, option)


def reasoning_named(name: str, option: str) -> str:
    """The format of reasoning that goes by a name, "" for `none`. Raises `StartupError` if there is none."""
    return _named(name, REASONING, REASONING_SYNONYMS, option)


def _named(name: str, known: Mapping[str, object], synonyms: Mapping[str, str], option: str) -> str:
    if name == NONE:
        return ""
    found = synonyms.get(name, name)
    if found not in known:
        raise StartupError(f"{option}: there is no format {name!r}; there are {', '.join(known)} and {NONE}")
    return found
