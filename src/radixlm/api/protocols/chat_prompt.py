"""This module owns the prompt of a chat: what a body says about messages, tools and the template, rendered to ids."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from radixlm.api.limits import Json
from radixlm.api.protocols.fields import Reader
from radixlm.api.service import INLINE_CHARACTERS, Service
from radixlm.base.errors import BadRequest, ContextLengthExceeded


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """What a client wants of reasoning. None: it did not say.

    Attributes:
        enabled: whether the model should reason; templates read it as `enable_thinking` and `thinking`.
        effort: how much, for templates that read `reasoning_effort`.
        budget: tokens of reasoning at most.
        separate: reasoning is told apart from the answer; else both are one text.
        stream: reasoning is streamed as it comes; else it is one piece.
    """

    enabled: bool | None = None
    effort: str | None = None
    budget: int | None = None
    separate: bool = True
    stream: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Which tools may be called.

    Attributes:
        mode: auto | none (the model does not see them) | required (at least one of `names` is called).
        names: the functions that may be called; () for all of the tools.
        parallel: several calls in one answer are allowed. None, the client did not say: where they are not forced.
    """

    mode: Literal["auto", "none", "required"] = "auto"
    names: tuple[str, ...] = ()
    parallel: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """What the template of a chat sees.

    Attributes:
        messages: in OpenAI's form (see `text.messages`).
        tools: in OpenAI's form, `{"type": "function", "function": {"name", "description", "parameters", "strict"}}`.
        variables: further variables of the template (`chat_template_kwargs`).
        add_generation_prompt: end with the start of the assistant's turn; None: unless the final message is continued.
    """

    messages: Sequence[Any]
    tools: Sequence[Any] = ()
    choice: ToolChoice = ToolChoice()
    documents: Sequence[Any] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    reasoning: Reasoning = Reasoning()
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A chat as the model sees it."""

    tokens: tuple[int, ...]
    text: str


class ChatPromptFields(msgspec.Struct, kw_only=True, frozen=True):
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    documents: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    thinking_budget: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


FIELDS = Reader(
    ChatPromptFields,
    {
        "thinking_token_budget": "thinking_budget",
        "max_thinking_tokens": "thinking_budget",
        "thinking_budget": "thinking_budget",
    },
)


def read_prompt(body: Json) -> ChatPrompt:
    """The prompt of a body in OpenAI's form.

    Raises:
        BadRequest: a field has the wrong type, messages are missing, or the tools do not fit the choice among them.
    """
    fields = FIELDS.read(body)
    if fields.messages is None:
        raise BadRequest("messages is missing", param="messages")
    budget = fields.thinking_budget
    if budget is not None and budget < 0:
        name = FIELDS.public("thinking_budget", body)
        raise BadRequest(f"{name} is {budget}; it must be 0 or more", param=name)
    effort = fields.reasoning_effort
    return ChatPrompt(
        messages=fields.messages,
        tools=fields.tools or (),
        choice=read_tool_choice(fields.tool_choice, fields.parallel_tool_calls),
        documents=fields.documents,
        variables=fields.chat_template_kwargs or {},
        reasoning=Reasoning(
            enabled=False if effort == "none" else None,
            effort=effort,
            budget=budget,
            separate=fields.separate_reasoning is not False,
            stream=fields.stream_reasoning is not False,
        ),
        add_generation_prompt=fields.add_generation_prompt,
        continue_final_message=bool(fields.continue_final_message),
    )


def read_tool_choice(value: Any, parallel: bool | None = None) -> ToolChoice:
    """OpenAI's `tool_choice`: a mode, a function by name, or a list of allowed functions with a mode."""
    if value is None or value == "auto":
        return ToolChoice(parallel=parallel)
    if value == "none":
        return ToolChoice(mode="none")
    if value == "required":
        return ToolChoice(mode="required", parallel=parallel)
    if isinstance(value, Mapping):
        kind = value.get("type")
        name = _function_name(value)
        if kind == "function" and name is not None:
            return ToolChoice(mode="required", names=(name,), parallel=False)
        allowed = value.get("allowed_tools")
        if kind == "allowed_tools" and isinstance(allowed, Mapping) and isinstance(allowed.get("tools"), list):
            names = [_function_name(tool) if isinstance(tool, Mapping) else None for tool in allowed["tools"]]
            mode = allowed.get("mode", "auto")
            if names and None not in names and mode in ("auto", "required"):
                return ToolChoice(mode=mode, names=tuple(name for name in names if name is not None), parallel=parallel)
    raise BadRequest(
        "tool_choice must be none, auto, required, "
        "{type: function, function: {name}} or {type: allowed_tools, allowed_tools: {mode, tools}}",
        param="tool_choice",
    )


def _function_name(tool: Mapping[str, Any]) -> str | None:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) and name else None


async def render(prompt: ChatPrompt, service: Service, *, limited: bool = True) -> RenderedChat:
    """A chat, exactly as the model sees it.

    Args:
        limited: refuse a chat that is longer than the context.

    Raises:
        BadRequest: the messages or the tools are wrong, the template refuses them, or the model has none.
        ContextLengthExceeded: too long.
    """
    template = service.served.template
    if template is None:
        raise BadRequest(
            "this model has no chat template; use /v1/completions, or start the server with --chat-template",
            param="messages",
        )
    check_tools(prompt)
    variables = _variables(prompt)
    tools = None if prompt.choice.mode == "none" else list(prompt.tools) or None
    context_length = service.facts.model.context_length

    def work() -> RenderedChat:
        rendered = template.render(
            prompt.messages,
            tools=tools,
            documents=prompt.documents,
            add_generation_prompt=prompt.add_generation_prompt,
            continue_final_message=prompt.continue_final_message,
            extra=variables,
        )
        ids = service.tokenizer.encode_pieces(rendered.pieces, context_length if limited else None)
        return RenderedChat(tuple(ids), rendered.text)

    size = weight([prompt.messages, prompt.tools, prompt.documents, variables], INLINE_CHARACTERS)
    try:
        rendered = await service.workers.run(size, work)
    except ContextLengthExceeded as error:
        error.param = "messages"
        raise
    if not rendered.tokens:
        raise BadRequest("the chat is empty: it has no tokens", param="messages")
    return rendered


def _variables(prompt: ChatPrompt) -> dict[str, Any]:
    """What the template may read besides messages. What the client names itself goes first."""
    variables = dict(prompt.variables)
    wanted = prompt.reasoning
    if wanted.effort is not None:
        variables.setdefault("reasoning_effort", wanted.effort)
    if wanted.enabled is not None:
        variables.setdefault("enable_thinking", wanted.enabled)
        variables.setdefault("thinking", wanted.enabled)
    return variables


#: What a function may be called: it must be told from the marks around it in every format.
_FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.-]{1,256}")


def check_tools(prompt: ChatPrompt) -> None:
    """Raises `BadRequest` for tools that are not in OpenAI's form, which templates rely on, or that a choice lacks."""
    names: set[str] = set()
    for index, tool in enumerate(prompt.tools):
        name = _function_name(tool) if isinstance(tool, Mapping) else None
        if name is None:
            raise BadRequest(
                f"tools[{index}] must have the form {{type: function, function: {{name, parameters}}}}", param="tools"
            )
        if not _FUNCTION_NAME.fullmatch(name):
            raise BadRequest(
                f"tools[{index}]: the name {name[:80]!r} may have letters, digits, _, - and . only", param="tools"
            )
        if not isinstance(tool["function"].get("parameters"), dict | None):
            raise BadRequest(f"tools[{index}]: parameters must be a JSON schema, an object", param="tools")
        names.add(name)
    if prompt.choice.mode == "required" and not names:
        raise BadRequest("tool_choice asks for a call, and there are no tools", param="tool_choice")
    for name in prompt.choice.names:
        if name not in names:
            raise BadRequest(f"tool_choice names {name[:80]!r}, which is none of the tools", param="tool_choice")


def weight(value: Any, enough: int) -> int:
    """How much there is in a JSON value: its characters, and a few for each item. Stops counting at `enough`."""
    total = 0
    waiting = [value]
    while waiting and total <= enough:
        item = waiting.pop()
        total += 8
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, dict):
            waiting.extend(item.values())
        elif isinstance(item, list | tuple):
            waiting.extend(item)
    return total
