"""This module owns the list of what there is to describe: routes, what they do, and which readers read their bodies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from radixlm.api import control
from radixlm.api.limits import Json
from radixlm.api.protocols import (
    anthropic,
    chat_prompt,
    constraints,
    embeddings,
    native,
    ollama,
    ollama_embed,
    ollama_info,
    openai,
    openai_chat,
    openai_completions,
    parsing,
    rerank,
    responses,
    score,
    sessions,
    tokens,
)
from radixlm.api.protocols.fields import Reader

#: Fields by name, with their JSON schemas.
Typed = Mapping[str, Json]

#: A value that a reader does not type: its JSON schema, or what reads an object within the body.
More = Mapping[str, Json | tuple[Reader[Any] | Typed, ...]]

TEXT: Json = {"type": "string"}
IDS: Json = {"type": "array", "items": {"type": "integer"}}
PROMPTS: Json = {
    "anyOf": [TEXT, IDS, {"type": "array", "items": TEXT}, {"type": "array", "items": IDS}],
    "description": "a text, token ids, or a list of either",
}
TEXTS: Json = {"anyOf": [TEXT, {"type": "array", "items": TEXT}]}
ID_LISTS: Json = {"anyOf": [IDS, {"type": "array", "items": IDS}]}


#: What an answer must match: these fields are read apart from the others.
GRAMMARS: Typed = {
    name: {"type": "array", "items": TEXT} if kind == "choice" else {} if kind == "json_schema" else TEXT
    for name, kind in constraints.FIELDS.items()
} | {"structured_outputs": {"type": "object"}}
FORMATS: Typed = {**GRAMMARS, "response_format": {"type": "object"}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A route.

    Attributes:
        paths: the first is its name, the others do the same.
        tag: the dialect.
        readers: what the body is read with, in order; none for a route without a body.
        more: fields beside those of the readers, or instead of them.
        hidden: fields of the readers that have no meaning here.
        required: fields that must be there.
        example: a body.
        answer: a struct of `msgspec`, or None for an object whose fields are not listed.
        streams: content type of its streams, "" if it does not stream.
        public: no key is needed.
    """

    paths: str
    method: str
    tag: str
    summary: str
    readers: tuple[Reader[Any], ...] = ()
    more: More = field(default_factory=dict)
    hidden: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    example: Json | None = None
    answer: Any = None
    streams: str = ""
    public: bool = False


EVENTS, LINES = "text/event-stream", "application/x-ndjson"
CHAT = [{"role": "user", "content": "Hello"}]
_OPENAI = (openai.COMMON, openai.SAMPLING, openai.TEXT)


def _get(paths: str, tag: str, summary: str, public: bool = False) -> Entry:
    return Entry(paths=paths, method="GET", tag=tag, summary=summary, public=public)


TABLE: tuple[Entry, ...] = (
    Entry(
        paths="/v1/chat/completions",
        method="POST",
        tag="OpenAI",
        summary="answer a chat",
        readers=(*_OPENAI, chat_prompt.FIELDS, openai_chat.FIELDS),
        more=FORMATS,
        required=("model", "messages"),
        example={"model": "smollm2", "messages": CHAT, "max_tokens": 16},
        answer=openai_chat.Answer,
        streams=EVENTS,
    ),
    Entry(
        paths="/v1/completions",
        method="POST",
        tag="OpenAI",
        summary="continue texts or token ids; score them",
        readers=(*_OPENAI, openai_completions.FIELDS),
        more={"prompt": PROMPTS, **FORMATS},
        required=("model", "prompt"),
        example={"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 8},
        answer=openai_completions.Completion,
        streams=EVENTS,
    ),
    Entry(
        paths="/v1/responses",
        method="POST",
        tag="OpenAI",
        summary="answer items; the response can be kept and gone on from",
        readers=(responses.FIELDS, responses.SAMPLING, responses.TEXT),
        more={"input": {"anyOf": [TEXT, {"type": "array", "items": {"type": "object"}}]}},
        hidden=("n",),
        required=("model", "input"),
        example={"model": "smollm2", "input": "Hello", "max_output_tokens": 16},
        streams=EVENTS,
    ),
    Entry(
        paths="/v1/responses/input_tokens",
        method="POST",
        tag="OpenAI",
        summary="how many tokens a response's input has",
        readers=(responses.FIELDS,),
        more={"input": {"anyOf": [TEXT, {"type": "array", "items": {"type": "object"}}]}},
        required=("model", "input"),
        example={"model": "smollm2", "input": "Hello"},
    ),
    _get("/v1/responses/{id}", "OpenAI", "a kept response"),
    Entry(paths="/v1/responses/{id}", method="DELETE", tag="OpenAI", summary="forget a kept response"),
    Entry(paths="/v1/responses/{id}/cancel", method="POST", tag="OpenAI", summary="end a response in the background"),
    _get("/v1/responses/{id}/input_items", "OpenAI", "what a kept response was made from"),
    Entry(
        paths="/v1/embeddings",
        method="POST",
        tag="OpenAI",
        summary="vectors of texts",
        readers=(embeddings.FIELDS,),
        more={"input": PROMPTS},
        required=("model", "input"),
        example={"model": "all-minilm-l6-v2", "input": ["one text", "another"]},
        answer=embeddings.Embeddings,
    ),
    Entry(
        paths="/v1/rerank /rerank /v2/rerank",
        method="POST",
        tag="OpenAI",
        summary="documents in the order of their likeness to a query",
        readers=(rerank.FIELDS,),
        required=("query", "documents"),
        example={"query": "food", "documents": ["A man eats bread.", "The market fell."]},
        answer=rerank.Ranking,
    ),
    Entry(
        paths="/v1/score",
        method="POST",
        tag="native",
        summary="how probable continuations of a prompt are, or tokens behind each of several items",
        readers=(score.FIELDS,),
        more={"prompt": PROMPTS, "continuations": PROMPTS, "query": PROMPTS, "items": PROMPTS},
        example={"prompt": "The sky is", "continuations": [" blue", " green"]},
    ),
    _get("/v1/models", "OpenAI", "the model served"),
    _get("/v1/models/{id}", "OpenAI", "the model served, if that is its name"),
    Entry(
        paths="/v1/messages",
        method="POST",
        tag="Anthropic",
        summary="answer a chat",
        readers=(anthropic.FIELDS, anthropic.SAMPLING, anthropic.TEXT),
        hidden=("n",),
        required=("model", "messages", "max_tokens"),
        example={"model": "smollm2", "messages": CHAT, "max_tokens": 16},
        streams=EVENTS,
    ),
    Entry(
        paths="/v1/messages/count_tokens",
        method="POST",
        tag="Anthropic",
        summary="how many tokens a chat has",
        readers=(anthropic.FIELDS,),
        required=("model", "messages"),
        example={"model": "smollm2", "messages": CHAT},
    ),
    Entry(
        paths="/api/chat",
        method="POST",
        tag="Ollama",
        summary="answer a chat; streams unless told not to",
        readers=(ollama.FIELDS,),
        more={"options": (ollama.SAMPLING, ollama.TEXT)},
        hidden=("prompt", "system", "raw", *ollama.HIDDEN),
        required=("model",),
        example={"model": "smollm2", "messages": CHAT, "stream": False},
        streams=LINES,
    ),
    Entry(
        paths="/api/generate",
        method="POST",
        tag="Ollama",
        summary="answer one prompt; streams unless told not to",
        readers=(ollama.FIELDS,),
        more={"options": (ollama.SAMPLING, ollama.TEXT)},
        hidden=("messages", "tools", *ollama.HIDDEN),
        required=("model",),
        example={"model": "smollm2", "prompt": "Hello", "stream": False},
        streams=LINES,
    ),
    Entry(
        paths="/api/embed",
        method="POST",
        tag="Ollama",
        summary="vectors of texts",
        readers=(ollama_embed.FIELDS,),
        hidden=("prompt",),
        required=("model", "input"),
        example={"model": "all-minilm-l6-v2", "input": "a text"},
    ),
    Entry(
        paths="/api/embeddings",
        method="POST",
        tag="Ollama",
        summary="the vector of one text, the older form",
        readers=(ollama_embed.FIELDS,),
        hidden=("input", "truncate", "dimensions"),
        required=("model", "prompt"),
        example={"model": "all-minilm-l6-v2", "prompt": "a text"},
    ),
    _get("/api/tags", "Ollama", "the models that are there"),
    _get("/api/ps", "Ollama", "the models that are loaded"),
    _get("/api/version", "Ollama", "the version of Ollama's API that is followed"),
    Entry(
        paths="/api/show",
        method="POST",
        tag="Ollama",
        summary="facts of a model",
        readers=(ollama_info.SHOW,),
        example={"model": "smollm2"},
    ),
    Entry(
        paths="/generate",
        method="POST",
        tag="native",
        summary="continue texts or token ids; events repeat the text so far",
        readers=(native.FIELDS,),
        more={
            "text": TEXTS,
            "input_ids": ID_LISTS,
            "sampling_params": (native.SAMPLING, native.TEXT, GRAMMARS),
            "session_params": (sessions.TURN,),
        },
        example={"text": "The capital of France is", "sampling_params": {"max_new_tokens": 8, "temperature": 0}},
        streams=EVENTS,
    ),
    Entry(
        paths="/generate",
        method="PUT",
        tag="native",
        summary="the same as POST",
        readers=(native.FIELDS,),
        more={
            "text": TEXTS,
            "input_ids": ID_LISTS,
            "sampling_params": (native.SAMPLING, native.TEXT, GRAMMARS),
            "session_params": (sessions.TURN,),
        },
        streams=EVENTS,
    ),
    Entry(
        paths="/encode",
        method="POST",
        tag="native",
        summary="vectors of texts or token ids",
        readers=(embeddings.FIELDS,),
        more={"text": TEXTS, "input_ids": ID_LISTS},
        example={"text": "a text"},
    ),
    Entry(
        paths="/tokenize /v1/tokenize",
        method="POST",
        tag="native",
        summary="a text or messages to token ids",
        readers=(tokens.TOKENIZE, chat_prompt.FIELDS),
        more={"prompt": TEXTS},
        example={"prompt": "Hello"},
    ),
    Entry(
        paths="/detokenize /v1/detokenize",
        method="POST",
        tag="native",
        summary="token ids to text",
        readers=(tokens.DETOKENIZE,),
        more={"tokens": ID_LISTS},
        required=("tokens",),
        example={"tokens": [1, 2, 3]},
    ),
    Entry(
        paths="/parse_function_call",
        method="POST",
        tag="native",
        summary="take the calls of tools out of a text",
        readers=(parsing.CALLS,),
    ),
    Entry(
        paths="/separate_reasoning",
        method="POST",
        tag="native",
        summary="take the reasoning out of a text",
        readers=(parsing.REASONING,),
    ),
    Entry(
        paths="/open_session",
        method="POST",
        tag="native",
        summary="begin a session, whose turns are kept; its name",
        readers=(sessions.OPEN,),
        example={"timeout": 600},
        answer=str,
    ),
    Entry(
        paths="/close_session",
        method="POST",
        tag="native",
        summary="end a session",
        readers=(sessions.CLOSE,),
        required=("session_id",),
    ),
    Entry(
        paths="/abort_request",
        method="POST",
        tag="control",
        summary="end a request by its name, or all of them",
        readers=(control.ABORT,),
        example={"rid": "mine"},
    ),
    Entry(paths="/flush_cache", method="POST", tag="control", summary="drop every cached prefix"),
    _get("/flush_cache", "control", "the same as POST"),
    _get("/health /healthz /ready /ping", "health", "200 while requests are taken, else 503", public=True),
    _get("/live", "health", "200 as long as the process answers", public=True),
    _get("/health_generate", "health", "as /health, and one token is generated to prove it"),
    _get("/metrics", "information", "figures for Prometheus"),
    _get("/model_info /get_model_info", "information", "facts of the model"),
    _get("/server_info /get_server_info", "information", "facts, choices with their reasons, configuration"),
    _get("/version", "information", "the server's version"),
    _get("/", "information", "what this is, and its routes"),
    _get("/openapi.json", "information", "this description, for programs"),
    _get("/docs", "information", "this description, for people"),
)
