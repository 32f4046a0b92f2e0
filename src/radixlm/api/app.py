"""This module owns the HTTP app: the table of routes and the layers around it.

Edge (request id, last catch) > CORS > Auth > Gate (503 while starting) > routes
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from radixlm.api import errors
from radixlm.api.auth import Auth, Keys
from radixlm.api.control import Control
from radixlm.api.edge import Edge, Gate
from radixlm.api.hub import Hub
from radixlm.api.info import Info, json_response
from radixlm.api.keyfile import read_keys
from radixlm.api.limits import Json, read_json
from radixlm.api.protocols import (
    anthropic,
    embeddings,
    native,
    ollama,
    ollama_embed,
    ollama_info,
    openai_chat,
    openai_completions,
    parsing,
    rerank,
    responses,
    score,
    sessions,
    tokens,
)
from radixlm.api.protocols.job import Job
from radixlm.api.reference.openapi import document
from radixlm.api.reference.page import page
from radixlm.api.service import Served, Service
from radixlm.api.sse import Events, Whole
from radixlm.base.errors import RadixError
from radixlm.config.schema import Config, ServerConfig
from radixlm.observe.metrics import Metrics

log = logging.getLogger("radixlm.api")

Parse = Callable[[Json, Service], Awaitable[Job]]
Answer = Callable[[Json, Service], Awaitable[Any]]
#: The page of `/docs` loads nothing and runs nothing.
DOCS_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

Handler = Callable[[Request], Awaitable[ASGIApp]]


def build_app(hub: Hub, served: Served, config: Config, metrics: Metrics) -> ASGIApp:
    """The whole app. It answers from the start on: 503 until the hub is open.

    Raises:
        StartupError: the file of keys cannot be used.
    """
    service = Service(hub, served, config)
    file = config.server.api_key_file
    keys = Keys(config.server.api_key, config.server.admin_api_key, read_keys(file) if file else ())
    table = routes(service, keys, metrics)
    app = Starlette(
        routes=table,
        middleware=[*_cors(config.server), Middleware(Auth, keys=keys), Middleware(Gate, hub=hub)],
        exception_handlers={
            RadixError: _on_error,
            HTTPException: _on_http_error,
            ClientDisconnect: _on_disconnect,
            Exception: _on_bug,  # answered by the framework, which raises it again for the edge to log
        },
    )
    app.router.redirect_slashes = False
    return Edge(app, metrics, {route.endpoint: route.path for route in reversed(table)})


def routes(service: Service, keys: Keys, metrics: Metrics) -> list[Route]:
    """The table of routes. A function of its own, so that tests can walk every one of them."""
    table: list[Route] = []
    info = Info(service, metrics, table)
    control = Control(service, keys)
    kept = responses.Responses(service)
    models = ollama_info.OllamaInfo(service)
    for paths, methods, handler in (
        ("/", "GET", info.hello),
        ("/version", "GET", info.version),
        ("/live", "GET", info.live),
        ("/health /healthz /ready /ping", "GET", info.health),
        ("/health_generate", "GET", info.health_generate),
        ("/v1/models", "GET", info.models),
        ("/v1/models/{id:path}", "GET", info.model),
        ("/model_info /get_model_info", "GET", info.model_info),
        ("/server_info /get_server_info", "GET", info.server_info),
        ("/metrics", "GET", info.metrics),
        ("/openapi.json", "GET", _openapi),
        ("/docs", "GET", _docs),
        ("/generate", "POST PUT", _generating(native.parse, service)),
        ("/v1/completions", "POST", _generating(openai_completions.parse, service)),
        ("/v1/chat/completions", "POST", _generating(openai_chat.parse, service)),
        ("/v1/score", "POST", _generating(score.parse, service)),
        ("/v1/responses", "POST", kept.create),
        ("/v1/responses/input_tokens", "POST", _answering(kept.input_tokens, service)),
        ("/v1/responses/{id}", "GET", kept.retrieve),
        ("/v1/responses/{id}", "DELETE", kept.delete),
        ("/v1/responses/{id}/cancel", "POST", kept.cancel),
        ("/v1/responses/{id}/input_items", "GET", kept.input_items),
        ("/v1/messages", "POST", _generating(anthropic.parse, service)),
        ("/v1/messages/count_tokens", "POST", _answering(anthropic.count_tokens, service)),
        ("/api/chat", "POST", _generating(ollama.chat, service)),
        ("/api/generate", "POST", _generating(ollama.generate, service)),
        ("/api/embed", "POST", _generating(ollama_embed.embed, service)),
        ("/api/embeddings", "POST", _generating(ollama_embed.embeddings, service)),
        ("/api/tags", "GET", models.tags),
        ("/api/ps", "GET", models.running),
        ("/api/version", "GET", models.version),
        ("/api/show", "POST", _answering(ollama_info.show, service)),
        ("/v1/embeddings", "POST", _generating(embeddings.parse, service)),
        ("/encode", "POST", _generating(embeddings.parse_native, service)),
        ("/v1/rerank /rerank /v2/rerank", "POST", _generating(rerank.parse, service)),
        ("/tokenize /v1/tokenize", "POST", _answering(tokens.tokenize, service)),
        ("/detokenize /v1/detokenize", "POST", _answering(tokens.detokenize, service)),
        ("/parse_function_call", "POST", _answering(parsing.parse_function_call, service)),
        ("/separate_reasoning", "POST", _answering(parsing.separate_reasoning, service)),
        ("/flush_cache", "POST GET", control.flush_cache),
        ("/open_session", "POST", _answering(sessions.open_session, service)),
        ("/close_session", "POST", _answering(sessions.close_session, service)),
        ("/abort_request", "POST", control.abort_request),
    ):
        if paths == "/metrics" and service.config.observe.disable_metrics:
            continue
        table.extend(Route(path, handler, methods=methods.split()) for path in paths.split())
    return table


def _generating(parse: Parse, service: Service) -> Handler:
    """A route that generates, in one dialect."""
    limits, keep_alive = service.config.limits, service.config.server.sse_keepalive

    async def handle(request: Request) -> ASGIApp:
        job = await parse(await read_json(request, limits), service)
        stream = job.submit(service.hub, request.state.caller)
        return Events(stream, job.form, keep_alive, job.framing) if job.stream else Whole(stream, job.form)

    return handle


def _answering(answer: Answer, service: Service) -> Handler:
    """A route that answers JSON with JSON."""

    async def handle(request: Request) -> ASGIApp:
        return json_response(await answer(await read_json(request, service.config.limits), service))

    return handle


async def _openapi(request: Request) -> Response:
    return json_response(document())


async def _docs(request: Request) -> Response:
    return Response(page(), media_type="text/html", headers={"content-security-policy": DOCS_POLICY})


def _cors(config: ServerConfig) -> list[Middleware]:
    """No cross-origin headers at all unless origins are configured."""
    origins = [origin.strip() for origin in config.allowed_origins.split(",") if origin.strip()]
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST", "PUT", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    ]


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RadixError)
    if error.status == 500:
        log.error("request %s: %s", request.state.request_id, error.message)
    return errors.response(error, request.scope)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return errors.response(errors.from_http(error), request.scope, error.headers)


async def _on_bug(request: Request, error: Exception) -> Response:
    return errors.response(errors.internal(), request.scope)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it
