"""This module owns the responses that are kept: in memory, bounded in number and size, the least recently used first
out. They are gone when the server ends.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from radixlm.api.limits import Json
from radixlm.base.errors import NotFound

MAX_RESPONSES = 1024
MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Stored:
    """
    Attributes:
        response: as it was answered.
        before: items of the responses that this one went on from.
        given: items of its own input.
    """

    response: Json
    before: tuple[Json, ...]
    given: tuple[Json, ...]

    @property
    def items(self) -> tuple[Json, ...]:
        """The conversation up to and with this response."""
        return (*self.before, *self.given, *self.response["output"])


class ResponseStore:
    """
    Args:
        most, size: responses, and bytes of their JSON with all the items they went on from.
    """

    def __init__(self, most: int = MAX_RESPONSES, size: int = MAX_BYTES) -> None:
        self._most = most
        self._size = size
        self._held = 0
        self._stored: OrderedDict[str, tuple[Stored, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def bytes(self) -> int:
        return self._held

    def put(self, stored: Stored) -> None:
        """Keep a response, in place of an earlier state of it. One larger than all that is allowed is not."""
        name = stored.response["id"]
        self.drop(name)
        size = len(msgspec.json.encode((stored.response, stored.before, stored.given)))
        if size > self._size:
            return
        self._stored[name] = (stored, size)
        self._held += size
        while len(self._stored) > self._most or self._held > self._size:
            _, (_, freed) = self._stored.popitem(last=False)
            self._held -= freed

    def get(self, name: str, param: str | None = None) -> Stored:
        """Raises `NotFound` for one that never was, or is not kept any more."""
        found = self._stored.get(name)
        if found is None:
            raise NotFound(
                f"there is no response {name[:80]!r}; responses are kept in memory, the last {self._most} of them",
                param=param,
                code="response_not_found",
            )
        self._stored.move_to_end(name)
        return found[0]

    def drop(self, name: str) -> None:
        found = self._stored.pop(name, None)
        if found is not None:
            self._held -= found[1]
