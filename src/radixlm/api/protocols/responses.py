"""This module owns `/v1/responses`: OpenAI's dialect of items, responses that are kept, and conversations over them."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from radixlm.api import errors
from radixlm.api.errors import NotSupported
from radixlm.api.info import json_response
from radixlm.api.limits import Json, check_count, read_json
from radixlm.api.protocols.chat import ChatWish, prepare
from radixlm.api.protocols.chat_prompt import ChatPrompt, Reasoning, render
from radixlm.api.protocols.fields import Reader, refuse
from radixlm.api.protocols.requests import standing
from radixlm.api.protocols.responses_form import ResponseForm
from radixlm.api.protocols.responses_items import chat_messages, chat_tools, read_input, tool_choice
from radixlm.api.protocols.responses_store import ResponseStore, Stored
from radixlm.api.protocols.sampling import SamplingFields, TextFields, read_wish
from radixlm.api.protocols.structure import object_grammar, schema_grammar
from radixlm.api.service import Service
from radixlm.api.sse import Events, Whole
from radixlm.api.stream import Stream
from radixlm.base.errors import BadRequest, RadixError
from radixlm.base.request import Grammar, LogprobParams

SAMPLING = Reader(SamplingFields, {"max_output_tokens": "max_new_tokens"})
TEXT = Reader(TextFields, {"include_stop_str_in_output": "keep_stop", "no_stop_trim": "keep_stop"})

#: Refused when set: each would change the answer if it were ignored.
REFUSED = {
    "conversation": "use previous_response_id",
    "prompt": "prompts kept at OpenAI",
    "context_management": "the editing of contexts",
}

#: Of `include`: what is asked for by it and can be had.
LOGPROBS = "message.output_text.logprobs"


class ResponseFields(msgspec.Struct, kw_only=True, frozen=True):
    model: str | None = None
    input: Any = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    stream: bool | None = None
    background: bool | None = None
    truncation: str | None = None
    user: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


FIELDS = Reader(ResponseFields)


@dataclass(slots=True)
class _Asked:
    """A body, read: what the model sees and what the conversation is."""

    fields: ResponseFields
    prompt: ChatPrompt
    before: tuple[Json, ...]
    given: tuple[Json, ...]


class Responses:
    """Handlers, by the name of what they do. Owns the responses that are kept and those that run by themselves."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._store = ResponseStore()
        self._background: dict[str, asyncio.Task[None]] = {}

    async def create(self, request: Request) -> ASGIApp:
        service = self._service
        body = await read_json(request, service.config.limits)
        asked = self._read(body)
        fields = asked.fields
        stream, background = bool(fields.stream), bool(fields.background)
        if background and (stream or fields.store is False):
            raise NotSupported("background needs store, and no stream", param="background")
        name = f"resp_{uuid.uuid4().hex}"
        wish = read_wish(body, SAMPLING, TEXT, stream=stream, max_new_tokens=None, service=service)
        if wish.choices != 1:
            raise BadRequest(f"n is {wish.choices}; a response is one answer", param="n")
        chat = await prepare(
            ChatWish(
                prompt=asked.prompt,
                wish=wish,
                standing=standing(fields.priority, fields.cache_salt, None),
                rid=name,
                logprobs=_logprobs(fields, service),
                grammar=_grammar(fields),
                param="input",
            ),
            service,
        )

        def keep(response: Json) -> None:
            if fields.store is not False:
                self._store.put(Stored(response, asked.before, asked.given))

        frame = _frame(name, fields, body, service)
        form = ResponseForm(frame, chat, keep, service)
        running = service.hub.submit(request.state.caller.sign(chat.requests), group=name)
        if background:
            waiting = form.state("in_progress", [])
            keep(waiting)
            self._background[name] = asyncio.create_task(self._run(name, running, form))
            return json_response(waiting)
        if stream:
            return Events(running, form, service.config.server.sse_keepalive, form.framing)
        return Whole(running, form)

    async def retrieve(self, request: Request) -> Response:
        if request.query_params.get("stream") in ("true", "1"):
            raise NotSupported("a kept response is not streamed again", param="stream")
        return json_response(self._store.get(request.path_params["id"]).response)

    async def delete(self, request: Request) -> Response:
        name = request.path_params["id"]
        self._store.get(name)
        await self._end(name, "the response was deleted")
        self._store.drop(name)
        return json_response({"id": name, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """End a response that runs by itself. One that has ended stays as it is."""
        name = request.path_params["id"]
        self._store.get(name)
        await self._end(name, "cancelled by the client")
        return json_response(self._store.get(name).response)

    async def _end(self, name: str, reason: str) -> None:
        task = self._background.get(name)
        if task is not None:
            self._service.hub.abort(name, reason)
            await asyncio.wait([task])

    async def input_items(self, request: Request) -> Response:
        """What the response was made from, the newest item first unless `order=asc`."""
        stored = self._store.get(request.path_params["id"])
        items = [
            {"id": f"item_{index}", "status": "completed", **item}
            for index, item in enumerate((*stored.before, *stored.given))
        ]
        if request.query_params.get("order") != "asc":
            items.reverse()
        first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
        return json_response({"object": "list", "data": items, "first_id": first, "last_id": last, "has_more": False})

    async def input_tokens(self, body: Json, service: Service) -> Json:
        """How many tokens the model would see."""
        rendered = await render(self._read(body).prompt, service, limited=False)
        return {"object": "response.input_tokens", "input_tokens": len(rendered.tokens)}

    async def _run(self, name: str, running: Stream, form: ResponseForm) -> None:
        """A response in the background, from its submission to its end."""
        try:
            with running as stream:
                form.whole(await stream.whole())
        except RadixError as error:
            form.failed(error)
        except Exception:
            form.failed(errors.internal())
            raise
        finally:
            del self._background[name]

    def _read(self, body: Json) -> _Asked:
        fields = FIELDS.read(body)
        refuse(body, REFUSED)
        if not fields.model:
            raise BadRequest("model is missing; GET /v1/models lists what is served", param="model")
        self._service.served.check(fields.model)
        if fields.truncation not in (None, "auto", "disabled"):
            raise BadRequest("truncation must be auto or disabled", param="truncation")
        before: tuple[Json, ...] = ()
        if fields.previous_response_id is not None:
            stored = self._store.get(fields.previous_response_id, "previous_response_id")
            if stored.response["status"] == "in_progress":
                raise BadRequest("that response still runs", param="previous_response_id")
            before = stored.items
        if fields.input is None:
            raise BadRequest("input is missing", param="input")
        given = tuple(read_input(fields.input))
        prompt = ChatPrompt(
            messages=chat_messages((*before, *given), fields.instructions, len(before)),
            tools=chat_tools(fields.tools or []),
            choice=tool_choice(fields.tool_choice, fields.parallel_tool_calls),
            variables=fields.chat_template_kwargs or {},
            reasoning=_reasoning(fields.reasoning),
        )
        return _Asked(fields, prompt, before, given)


def _reasoning(asked: Json | None) -> Reasoning:
    effort = (asked or {}).get("effort")
    if effort is not None and not isinstance(effort, str):
        raise BadRequest("reasoning.effort must be a text", param="reasoning.effort")
    return Reasoning(enabled=False if effort == "none" else None, effort=effort)


def _grammar(fields: ResponseFields) -> Grammar | None:
    """`text.format`."""
    asked = (fields.text or {}).get("format")
    if asked is None:
        return None
    kind = asked.get("type") if isinstance(asked, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return object_grammar("text.format")
    if kind == "json_schema" and isinstance(asked.get("schema"), dict):
        return schema_grammar(asked["schema"], "text.format")
    raise BadRequest(
        "text.format must be {type: text}, {type: json_object} or {type: json_schema, name, schema}",
        param="text.format",
    )


def _logprobs(fields: ResponseFields, service: Service) -> LogprobParams | None:
    top = fields.top_logprobs or 0
    check_count(top, 0, service.config.limits.max_logprobs, "top_logprobs", "max-logprobs")
    return LogprobParams(top=top) if top or LOGPROBS in (fields.include or ()) else None


def _frame(name: str, fields: ResponseFields, body: Json, service: Service) -> Json:
    """What a response echoes."""
    return {
        "id": name,
        "object": "response",
        "created_at": int(time.time()),
        "model": service.served.name,
        "instructions": fields.instructions,
        "previous_response_id": fields.previous_response_id,
        "tools": fields.tools or [],
        "tool_choice": fields.tool_choice if fields.tool_choice is not None else "auto",
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "reasoning": {"effort": None, "summary": None, **(fields.reasoning or {})},
        "text": {"format": {"type": "text"}, **(fields.text or {})},
        "temperature": body.get("temperature"),
        "top_p": body.get("top_p"),
        "max_output_tokens": body.get("max_output_tokens"),
        "top_logprobs": fields.top_logprobs or 0,
        "truncation": fields.truncation or "disabled",
        "background": bool(fields.background),
        "store": fields.store is not False,
        "metadata": fields.metadata or {},
        "user": fields.user,
    }
