"""This module owns `Caller`: who makes a request, as far as the rest of the server needs to know. Never the key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from radixlm.base.request import Request


@dataclass(frozen=True, slots=True)
class Caller:
    """
    Attributes:
        name: of the key, "" for keys without a name and for callers without a key. What shares are counted by.
        weight: its part of the engine beside the others' (see `schedule.fairness`).
        admin: it may do what concerns everybody.
        private_cache: its requests share cached prefixes with no other key's.
    """

    name: str = ""
    weight: float = 1.0
    admin: bool = False
    private_cache: bool = False

    def sign(self, requests: Sequence[Request]) -> tuple[Request, ...]:
        """The requests with what the engine needs to know of who made them."""
        if not self.name:
            return tuple(requests)
        return tuple(
            msgspec.structs.replace(
                request,
                tenant=self.name,
                share=self.weight,
                namespace=f"{self.name}\n{request.namespace}" if self.private_cache else request.namespace,
            )
            for request in requests
        )


#: Who calls where nobody is told apart.
ANYBODY = Caller()
