"""This module owns what a chat asks of parsers and grammars, in the formats of the model that is served.

From tools, the choice among them and the wishes for reasoning it makes the fields of a `Request` that carry them out:
`Parsing` (take the answer apart), `Grammar` (force calls), `Thinking` (bound the reasoning).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from radixlm.api.errors import NotSupported
from radixlm.api.protocols.chat_prompt import ChatPrompt, RenderedChat
from radixlm.base.errors import BadRequest
from radixlm.base.request import Grammar, Parsing, Thinking
from radixlm.grammar import check
from radixlm.text.parsers.choose import Formats
from radixlm.text.parsers.forcing import BACKEND, WRITINGS, Function, either, is_text, required, triggered
from radixlm.text.parsers.formats import REASONING, TOOLS, Channels, Tags
from radixlm.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Carried:
    """What the requests of a chat carry.

    Attributes:
        tokens: of the prompt, with the start of the reasoning where it had to be put there.
    """

    tokens: tuple[int, ...]
    parsing: Parsing | None = None
    grammar: Grammar | None = None
    thinking: Thinking | None = None


def carried(
    prompt: ChatPrompt, rendered: RenderedChat, grammar: Grammar | None, formats: Formats, tokenizer: Tokenizer
) -> Carried:
    """
    Args:
        grammar: of the answer that is wanted, None for any.

    Raises:
        NotSupported: a call is to be forced, and the operator has turned tool calls off.
        BadRequest: the schema of a tool's parameters is none.
    """
    functions = functions_of(prompt)
    if functions:
        grammar = _grammar_of_calls(prompt, functions, grammar, formats, tokenizer)
    budget = prompt.reasoning.budget
    tokens = rendered.tokens
    shape = REASONING[formats.reasoning].shape if formats.reasoning else None
    inside, end, behind = False, "", ""
    if isinstance(shape, Tags):
        inside, end, behind = _inside(prompt, rendered, shape), shape.close, shape.close
        if (grammar is not None or budget is not None) and _will_open(prompt, rendered, shape, formats, inside):
            # Whether the model opens its reasoning must not be left to chance if something begins or ends with it.
            tokens += tuple(tokenizer.encode(shape.open + "\n", add_special_tokens=False))
            inside = True
    elif isinstance(shape, Channels):
        inside, end, behind = formats.native, shape.turn, shape.answer
    if grammar is not None and inside and not (isinstance(shape, Channels) and functions):
        # (A grammar of calls in channels has the reasoning in it.)
        after = tuple(tokenizer.encode(behind, add_special_tokens=False))
        grammar = msgspec.structs.replace(grammar, after=after)
    thinking = None
    if budget is not None and inside:
        thinking = Thinking(budget=budget, end=tuple(tokenizer.encode(end, add_special_tokens=False)))
    return Carried(tokens, _parsing(prompt, functions, shape, inside, formats), grammar, thinking)


def _parsing(
    prompt: ChatPrompt, functions: Sequence[Function], shape: Tags | Channels | None, inside: bool, formats: Formats
) -> Parsing | None:
    tools = formats.tools if functions else ""
    # Channels are taken apart even if the reasoning is not wanted apart: their headers are no text.
    reasoning = formats.reasoning if prompt.reasoning.separate or isinstance(shape, Channels) else ""
    if not tools and not reasoning:
        return None
    return Parsing(
        tools=tools,
        reasoning=reasoning,
        thinking=inside and isinstance(shape, Tags) and bool(reasoning),
        names=tuple(dict.fromkeys(function.name for function in functions)) if tools else (),
        texts=texts_of(functions) if tools and not TOOLS[tools].quotes else (),
    )


def _grammar_of_calls(
    prompt: ChatPrompt, functions: Sequence[Function], answer: Grammar | None, formats: Formats, tokenizer: Tokenizer
) -> Grammar | None:
    """A grammar where calls are forced, or where they are free but must be strict, single, or beside a given answer."""
    choice = prompt.choice
    forced = choice.mode == "required"
    if not forced and answer is None and choice.parallel is not False and not any(f.strict for f in functions):
        return None
    if not formats.tools:
        if forced:
            raise NotSupported("tool calls are turned off (--tool-call-parser none)", param="tool_choice")
        return answer
    writing = WRITINGS[formats.tools, formats.older]
    words = TOOLS[formats.tools].words
    special = {word: index for word in words if (index := tokenizer.id(word)) is not None}
    special = {word: index for word, index in special.items() if index in tokenizer.special_ids}
    if forced:
        return _lark(required(writing, functions, choice.parallel is True, special))
    free = [function if function.strict else Function(function.name, _ANY) for function in functions]
    parallel = choice.parallel is not False
    if answer is None:
        return _lark(triggered(writing, free, parallel, special))
    if answer.kind not in ("json_schema", "json_object"):
        raise NotSupported(f"an answer that is bound by a {answer.kind} cannot go with tools", param="tools")
    schema: Any = {"type": "object"}
    if answer.kind == "json_schema":
        try:
            schema = check.parse_schema(answer.text)
            check.check_schema(schema, check.LLGUIDANCE, BACKEND)
        except BadRequest as error:
            error.param = answer.param
            raise
    text = either(writing, free, parallel, special, schema)
    return _lark(text, answer.param)


def _lark(text: str, param: str = "tools") -> Grammar:
    return Grammar(kind="ebnf", text=text, backend=BACKEND, param=param)


#: Arguments of a function that is not strict, where nothing forces it to be called.
_ANY = {"type": "object", "additionalProperties": True}


def functions_of(prompt: ChatPrompt) -> list[Function]:
    """The functions that may be called."""
    choice = prompt.choice
    if choice.mode == "none":
        return []
    found = []
    for tool in prompt.tools:
        function = tool["function"]
        if not choice.names or function["name"] in choice.names:
            parameters = function.get("parameters")
            found.append(Function(function["name"], parameters, strict=bool(function.get("strict"))))
    return found


def texts_of(functions: Sequence[Function]) -> tuple[tuple[str, str], ...]:
    """(function, parameter) pairs whose value is a text by their schema."""
    return tuple(
        (function.name, key)
        for function in functions
        for key, schema in _properties(function).items()
        if is_text(schema)
    )


def _properties(function: Function) -> dict[str, Any]:
    properties = (function.parameters or {}).get("properties")
    return properties if isinstance(properties, dict) else {}


def _inside(prompt: ChatPrompt, rendered: RenderedChat, tags: Tags) -> bool:
    """The prompt ends within reasoning: it has just opened it, or the message that is continued did not close it."""
    if rendered.text.rstrip().endswith(tags.open):
        return True
    last = prompt.messages[-1].get("content") if prompt.continue_final_message else None
    return isinstance(last, str) and last.rfind(tags.open) > last.rfind(tags.close)


def _will_open(prompt: ChatPrompt, rendered: RenderedChat, tags: Tags, formats: Formats, inside: bool) -> bool:
    """The model would open its reasoning itself: it was trained to, and nothing in the prompt says otherwise."""
    off = prompt.reasoning.enabled is False or False in (
        prompt.variables.get("enable_thinking"),
        prompt.variables.get("thinking"),
    )
    closed = rendered.text.rstrip().endswith(tags.close)
    return formats.native and not (inside or off or closed or prompt.continue_final_message)
