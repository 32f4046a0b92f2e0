"""This module owns `/api/chat` and `/api/generate`: Ollama's dialect, where streams are lines of JSON."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from radixlm.api.errors import NotSupported
from radixlm.api.limits import Json, check_count
from radixlm.api.protocols.chat import Answers, CallIds, Chat, ChatWish, prepare
from radixlm.api.protocols.chat_prompt import ChatPrompt, Reasoning
from radixlm.api.protocols.fields import Reader, refuse
from radixlm.api.protocols.job import Job
from radixlm.api.protocols.ollama_form import FRAMING, Frame, LoadedForm, OllamaForm
from radixlm.api.protocols.prompts import encode
from radixlm.api.protocols.requests import Standing, requests_for
from radixlm.api.protocols.sampling import SamplingFields, TextFields, Wish, read_wish
from radixlm.api.protocols.structure import object_grammar, schema_grammar
from radixlm.api.service import Service
from radixlm.base.errors import BadRequest, NotFound
from radixlm.base.request import Grammar, LogprobParams

#: Options that are served: Ollama's name -> ours.
OPTIONS = {
    "num_predict": "max_new_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
}
SAMPLING = Reader(SamplingFields, OPTIONS, "options.")
TEXT = Reader(TextFields, prefix="options.")

#: What the readers know and Ollama's options do not have.
HIDDEN = tuple(name for name in (*SAMPLING.names, *TEXT.names) if name not in OPTIONS and name != "stop")

#: Options that change how tokens are chosen and are not served -> the value that means "not".
NEUTRAL = {"mirostat": 0, "tfs_z": 1, "typical_p": 1}

#: Refused when set.
REFUSED = {"images": "images", "suffix": "insertion", "template": "templates in requests", "context": "use /api/chat"}


class OllamaFields(msgspec.Struct, kw_only=True, frozen=True):
    model: str | None = None
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    format: str | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    stream: bool | None = None
    think: bool | str | None = None
    keep_alive: Any = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


FIELDS = Reader(OllamaFields)


async def chat(body: Json, service: Service) -> Job:
    fields = FIELDS.read(body)
    refuse(body, REFUSED)
    model = check_model(fields.model, service)
    stream = fields.stream is not False
    if not fields.messages:
        return _loaded(Frame(model, "message"), fields, stream)
    prompt = ChatPrompt(
        messages=chat_messages(fields.messages), tools=fields.tools or (), reasoning=_reasoning(fields.think)
    )
    return await _chat(Frame(model, "message"), prompt, fields, stream, service)


async def generate(body: Json, service: Service) -> Job:
    """One prompt: through the chat template, where the model has one and the prompt is not `raw`."""
    fields = FIELDS.read(body)
    refuse(body, REFUSED)
    model = check_model(fields.model, service)
    stream = fields.stream is not False
    frame = Frame(model, "response")
    if not fields.prompt:
        return _loaded(frame, fields, stream)
    if fields.raw or service.served.template is None:
        return await _raw(frame, fields, stream, service)
    messages = [{"role": "system", "content": fields.system}] if fields.system else []
    messages.append({"role": "user", "content": fields.prompt})
    prompt = ChatPrompt(messages=messages, reasoning=_reasoning(fields.think))
    return await _chat(frame, prompt, fields, stream, service)


def check_model(name: str | None, service: Service) -> str:
    """The name as the client wrote it. `:latest` at its end means nothing here."""
    if not name:
        raise BadRequest("model is missing; GET /api/tags lists what is served", param="model")
    try:
        service.served.check(name.removesuffix(":latest"))
    except NotFound:
        service.served.check(name)
    return name


def chat_messages(messages: Sequence[Any]) -> list[Json]:
    """Messages in OpenAI's form: arguments of calls stay objects, calls and their results get ids in their order."""
    chat: list[Json] = []
    waiting: list[str] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise BadRequest(f"{where} must be an object with role and content", param=where)
        if message.get("images"):
            raise BadRequest(f"{where} has images, and this model takes none", param=f"{where}.images")
        shaped = {name: message[name] for name in ("role", "content") if name in message}
        if isinstance(message.get("thinking"), str) and message["thinking"]:
            shaped["reasoning_content"] = message["thinking"]
        calls = message.get("tool_calls")
        if isinstance(calls, list) and calls:
            shaped["tool_calls"] = [
                {"id": f"call_{index}_{place}", "type": "function", **call} if isinstance(call, Mapping) else call
                for place, call in enumerate(calls)
            ]
            waiting = [call["id"] for call in shaped["tool_calls"] if isinstance(call, dict)]
        elif calls:
            shaped["tool_calls"] = calls  # refused where messages are checked
        if message.get("role") == "tool":
            if isinstance(message.get("tool_name"), str):
                shaped["name"] = message["tool_name"]
            shaped["tool_call_id"] = waiting.pop(0) if waiting else f"call_{index}"
        chat.append(shaped)
    return chat


async def _chat(frame: Frame, prompt: ChatPrompt, fields: OllamaFields, stream: bool, service: Service) -> Job:
    name = uuid.uuid4().hex
    asked = ChatWish(
        prompt=prompt,
        wish=_wish(fields, stream, service),
        standing=Standing(),
        rid=name,
        logprobs=_logprobs(fields, service),
        grammar=_grammar(fields.format),
    )
    return _job(name, frame, await prepare(asked, service), stream, service)


async def _raw(frame: Frame, fields: OllamaFields, stream: bool, service: Service) -> Job:
    """A prompt that the model goes on with as it is."""
    name = uuid.uuid4().hex
    text = f"{fields.system}\n\n{fields.prompt}" if fields.system else fields.prompt or ""
    (prompt,) = await encode(service, [text], "prompt")
    wish = dataclasses.replace(_wish(fields, stream, service), grammar=_grammar(fields.format))
    requests = requests_for(
        prompt, wish, _logprobs(fields, service), Standing(), rid=name, param="prompt", service=service
    )
    answers = Answers(len(prompt.tokens), 1, Reasoning(), False, CallIds("plain", ()), service)
    return _job(name, frame, Chat(tuple(requests), prompt, answers), stream, service)


def _job(name: str, frame: Frame, chat: Chat, stream: bool, service: Service) -> Job:
    return Job(chat.requests, name, stream, OllamaForm(frame, chat, stream, service), FRAMING)


def _loaded(frame: Frame, fields: OllamaFields, stream: bool) -> Job:
    """Without a prompt clients load the model, or unload it. It always is loaded."""
    reason = "unload" if fields.keep_alive in (0, "0") and fields.keep_alive is not False else "load"
    return Job((), uuid.uuid4().hex, stream, LoadedForm(frame, reason), FRAMING)


def _wish(fields: OllamaFields, stream: bool, service: Service) -> Wish:
    options = dict(fields.options or {})
    for name, neutral in NEUTRAL.items():
        if options.get(name) not in (None, neutral):
            raise NotSupported(f"options.{name} is not supported", param=f"options.{name}")
    known = {name: options[name] for name in (*OPTIONS, "stop") if name in options}
    if known.get("num_predict") in (-1, -2):
        del known["num_predict"]  # as long as the context allows
    if known.get("top_k") == 0:
        known["top_k"] = -1
    return read_wish(known, SAMPLING, TEXT, stream=stream, max_new_tokens=None, service=service)


def _reasoning(think: bool | str | None) -> Reasoning:
    if isinstance(think, str):
        return Reasoning(enabled=True, effort=think)
    return Reasoning(enabled=think)


def _grammar(asked: str | Mapping[str, Any] | None) -> Grammar | None:
    if not asked:
        return None
    if isinstance(asked, str):
        if asked != "json":
            raise BadRequest(f"format is {asked[:40]!r}; it must be json, or a JSON schema", param="format")
        return object_grammar("format")
    return schema_grammar(asked, "format")


def _logprobs(fields: OllamaFields, service: Service) -> LogprobParams | None:
    top = fields.top_logprobs or 0
    check_count(top, 0, service.config.limits.max_logprobs, "top_logprobs", "max-logprobs")
    return LogprobParams(top=top) if fields.logprobs else None
