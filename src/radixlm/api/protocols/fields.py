"""This module owns the reading of JSON objects into typed structs; errors name a field as the client wrote it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeVar

import msgspec

from radixlm.api.errors import NotSupported
from radixlm.base.errors import BadRequest

T = TypeVar("T", bound=msgspec.Struct)
Json = dict[str, Any]

_PLACE = re.compile(r"(?P<what>.*) - at `\$\.(?P<field>\w+)(?P<rest>.*)`$", re.DOTALL)


class Reader(Generic[T]):
    """Reads one struct out of bodies that spell its fields in a dialect's way.

    Unknown fields are passed over, null is the same as not there, types are exact: no number for a text, no boolean
    for a number.

    Args:
        aliases: the dialect's name -> the struct's field, where they differ. Where several stand for one field, the
            first that is there counts.
        prefix: in front of field names in errors, for objects within the body.
    """

    def __init__(self, kind: type[T], aliases: Mapping[str, str] | None = None, prefix: str = "") -> None:
        self._kind = kind
        self._aliases = dict(aliases or {})
        self._prefix = prefix
        renamed = set(self._aliases.values())
        for field in msgspec.structs.fields(kind):
            if field.name not in renamed:
                self._aliases.setdefault(field.name, field.name)

    @property
    def kind(self) -> type[T]:
        """The struct that is read."""
        return self._kind

    @property
    def aliases(self) -> Mapping[str, str]:
        """What the dialect calls the fields -> the struct's fields."""
        return self._aliases

    @property
    def names(self) -> Iterable[str]:
        """What the dialect calls the fields."""
        return self._aliases.keys()

    def read(self, body: Json) -> T:
        """Raises `BadRequest` with `param` for a field of the wrong type."""
        picked: Json = {}
        for name, field in self._aliases.items():
            value = body.get(name)
            if value is not None and field not in picked:
                picked[field] = value
        try:
            return msgspec.convert(picked, self._kind)
        except msgspec.ValidationError as error:
            raise self._explained(str(error), body) from None

    def public(self, field: str, body: Json) -> str:
        """What the client called `field`."""
        return self._prefix + self._spelled(field, body)

    def renamed(self, error: BadRequest, body: Json) -> BadRequest:
        """An error about the struct's fields, in the client's words."""
        if error.param is None:
            return error
        names = "|".join({re.escape(field) for field in self._aliases.values()})
        message = re.sub(rf"\b({names})\b", lambda match: self._spelled(match[0], body), error.message)
        return type(error)(message, param=self.public(error.param, body), code=error.code)

    def _spelled(self, field: str, body: Json) -> str:
        names = [name for name, target in self._aliases.items() if target == field]
        said = [name for name in names if body.get(name) is not None]
        return (said or names or [field])[0]

    def _explained(self, message: str, body: Json) -> BadRequest:
        place = _PLACE.fullmatch(message)
        if place is None:
            return BadRequest(message[:1].lower() + message[1:])
        name = self.public(place["field"], body)
        what = place["what"].replace(" | null", "").replace("`", "")
        return BadRequest(f"{name}{place['rest'].replace('[...]', '')}: {what[:1].lower()}{what[1:]}", param=name)


def refuse(body: Json, unserved: Mapping[str, str]) -> None:
    """Raise for the first field that is set and would change the answer if it were ignored.

    Args:
        unserved: field -> what it is, for the reader. A field that is null, false or empty is not set.
    """
    for name, what in unserved.items():
        if body.get(name):
            raise NotSupported(f"{name} ({what}) is not supported", param=name)
