"""This module owns `/open_session`, `/close_session` and the `session_params` of `/generate`."""

from __future__ import annotations

import math

import msgspec

from radixlm.api.limits import Json, check_name
from radixlm.api.protocols.fields import Reader, refuse
from radixlm.api.service import Service
from radixlm.api.sessions import Place
from radixlm.base.errors import BadRequest

#: A longer time-out is none.
LONGEST_TIMEOUT = 30 * 24 * 3600.0


class OpenFields(msgspec.Struct, kw_only=True, frozen=True):
    session_id: str | None = None
    timeout: float | None = None
    capacity_of_str_len: int | None = None


class CloseFields(msgspec.Struct, kw_only=True, frozen=True):
    session_id: str | None = None


class TurnFields(msgspec.Struct, kw_only=True, frozen=True):
    id: str | None = None
    rid: str | None = None
    offset: int | None = None
    replace: bool | None = None
    drop_previous_output: bool | None = None


OPEN = Reader(OpenFields)
CLOSE = Reader(CloseFields)
TURN = Reader(TurnFields, prefix="session_params.")


async def open_session(body: Json, service: Service) -> str:
    """The session's name, as a JSON text."""
    fields = OPEN.read(body)
    refuse(body, {"streaming": "sessions that stream their input"})
    timeout = fields.timeout or 0.0
    if not math.isfinite(timeout) or not 0.0 <= timeout <= LONGEST_TIMEOUT:
        raise BadRequest(f"timeout is {timeout}; it must be between 0 and {LONGEST_TIMEOUT:g} seconds", param="timeout")
    return service.sessions.open(check_name(fields.session_id or "", "session_id") or None, timeout)


async def close_session(body: Json, service: Service) -> Json:
    fields = CLOSE.read(body)
    if not fields.session_id:
        raise BadRequest("session_id is missing", param="session_id")
    service.sessions.close(fields.session_id)
    return {"closed": fields.session_id}


def read_place(params: Json, service: Service) -> Place:
    """Where a turn goes in its session."""
    fields = TURN.read(params)
    if not fields.id:
        raise BadRequest("session_params.id is missing", param="session_params.id")
    return service.sessions.place(
        fields.id,
        fields.rid,
        fields.offset,
        replace=fields.replace is True,
        drop_output=fields.drop_previous_output is True,
    )
