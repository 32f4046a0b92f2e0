"""This module owns the routes that act on the engine: dropping the cache, aborting requests."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from radixlm.api.auth import Keys, bearer
from radixlm.api.info import json_response
from radixlm.api.limits import read_json
from radixlm.api.protocols.fields import Reader
from radixlm.api.service import Service
from radixlm.base.errors import BadRequest, Forbidden


class AbortFields(msgspec.Struct, kw_only=True, frozen=True):
    rid: str | None = None
    abort_all: bool | None = None


ABORT = Reader(AbortFields)


class Control:
    """Handlers, by the name of what they do."""

    def __init__(self, service: Service, keys: Keys) -> None:
        self._service = service
        self._keys = keys

    async def flush_cache(self, request: Request) -> Response:
        """Drop every cached prefix. Refused by the engine while requests run."""
        answer = await self._service.hub.query("flush")
        return json_response({"success": True, **answer})

    async def abort_request(self, request: Request) -> Response:
        """End the sequences of `rid`, or all of them. Harmless if there are none: `aborted` tells how many.

        Without the admin key only those of the caller's own key: names of others' requests can be guessed.
        """
        fields = ABORT.read(await read_json(request, self._service.config.limits))
        hub = self._service.hub
        admin = self._keys.is_admin(bearer(request.headers))
        if fields.abort_all:
            if not admin:
                raise Forbidden("abort_all needs the admin key (--admin-api-key)")
            return json_response({"aborted": hub.abort_all("aborted by the operator")})
        if not fields.rid:
            raise BadRequest("give the rid of a request, or abort_all: true", param="rid")
        tenant = None if admin else request.state.caller.name
        return json_response({"aborted": hub.abort(fields.rid, "aborted by /abort_request", tenant)})
