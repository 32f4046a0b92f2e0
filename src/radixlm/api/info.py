"""This module owns the routes that tell of the server: health, models, facts, metrics."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from radixlm.api import errors
from radixlm.api.hub import Stage
from radixlm.api.limits import Json
from radixlm.api.service import Service
from radixlm.api.start import probe
from radixlm.base.errors import NotFound, RadixError, TimedOut
from radixlm.config.schema import Config
from radixlm.observe.metrics import Metrics

#: Seconds that `/health_generate` waits for its token, and that a scrape waits for the engine's figures.
PROBE_SECONDS = 30.0
SCRAPE_SECONDS = 2.0


def json_response(body: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


class Info:
    """Handlers, by the name of what they tell."""

    def __init__(self, service: Service, metrics: Metrics, routes: Sequence[Route]) -> None:
        self._service = service
        self._metrics = metrics
        self._routes = routes

    async def hello(self, request: Request) -> Response:
        return json_response(
            {
                "name": "radixlm",
                "version": self._service.version,
                "model": self._service.served.name,
                "routes": [route.path for route in self._routes],
            }
        )

    async def version(self, request: Request) -> Response:
        return json_response({"version": self._service.version})

    # ---- health

    async def live(self, request: Request) -> Response:
        """This process answers. Says nothing of the engine."""
        return json_response({"status": "ok"})

    async def health(self, request: Request) -> Response:
        """200 if requests are taken, else 503 with the reason. Costs nothing."""
        hub = self._service.hub
        if hub.stage is not Stage.READY:
            return errors.response(hub.refusal())
        return json_response({"status": "ok"})

    async def health_generate(self, request: Request) -> Response:
        """As `health`, and one token is generated to prove it."""
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                await probe(self._service.hub, self._service.facts)
        except TimeoutError:
            raise TimedOut(f"no token came within {PROBE_SECONDS:g} s") from None
        return json_response({"status": "ok"})

    # ---- the model

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        if request.path_params["id"] not in self._service.served.names:
            raise NotFound(
                f"there is no such model; this server has {self._service.served.name!r}", code="model_not_found"
            )
        return json_response(self._card())

    def _card(self) -> Json:
        service = self._service
        return {
            "id": service.served.name,
            "object": "model",
            "created": service.created,
            "owned_by": "radixlm",
            "root": service.served.name,
            "parent": None,
            "max_model_len": service.facts.model.context_length,
        }

    async def model_info(self, request: Request) -> Response:
        service, config, facts = self._service, self._service.config, self._service.facts.model
        return json_response(
            {
                "model_path": config.model.served_model_name or config.model.model,
                "served_model_name": service.served.name,
                "is_generation": facts.generates,
                "pooling": facts.pooling,
                "architecture": facts.architecture,
                "dtype": facts.dtype,
                "parameters": facts.parameters,
                "layers": facts.layers,
                "hidden_size": facts.hidden_size,
                "vocab_size": facts.vocab_size,
                "context_length": facts.context_length,
                "eos_token_ids": facts.eos_ids,
                "bos_token_id": facts.bos_id,
                "has_chat_template": service.served.template is not None,
                "tool_call_parser": service.served.formats.tools or None,
                "reasoning_parser": service.served.formats.reasoning or None,
                "sampling_defaults": dict(service.served.sampling),
            }
        )

    # ---- the server

    async def server_info(self, request: Request) -> Response:
        """Configuration without secrets, facts, and the engine's figures where it answers in time."""
        service = self._service
        facts, formats = service.facts, service.served.formats
        try:
            figures: Json | None = await service.hub.query("stats", SCRAPE_SECONDS)
        except RadixError:
            figures = None
        return json_response(
            {
                "version": service.version,
                "status": service.hub.stage.value,
                "created": service.created,
                "requests_in_flight": service.hub.in_flight,
                "device": facts.device,
                "pool": facts.pool,
                "max_total_num_tokens": facts.pool.tokens,
                "decisions": {
                    **{name: {"value": value, "reason": why} for name, (value, why) in facts.decisions.items()},
                    "tool_call_parser": {"value": formats.tools, "reason": formats.reasons.get("tool_call_parser", "")},
                    "reasoning_parser": {
                        "value": formats.reasoning,
                        "reason": formats.reasons.get("reasoning_parser", ""),
                    },
                },
                "startup_seconds": facts.timings,
                "config": shown_config(service.config),
                "engine": figures,
            }
        )

    async def metrics(self, request: Request) -> Response:
        """The figures as of now, or as last heard from an engine that is in the middle of a long step."""
        hub, metrics = self._service.hub, self._metrics
        try:
            metrics.engine(await hub.query("stats", SCRAPE_SECONDS))
        except RadixError:
            metrics.up(hub.stage is not Stage.DEAD)
        metrics.started(self._service.facts.timings)
        body, kind = metrics.render(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": kind})


def shown_config(config: Config) -> Json:
    """Every option by its branch; secrets only as set or not."""
    shown: Json = {}
    for branch in dataclasses.fields(config):
        owner = getattr(config, branch.name)
        shown[branch.name] = {
            field.name: (getattr(owner, field.name) is not None)
            if field.metadata.get("secret")
            else getattr(owner, field.name)
            for field in dataclasses.fields(owner)
        }
    return shown
