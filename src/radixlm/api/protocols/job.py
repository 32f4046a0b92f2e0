"""This module owns `Job`: what a dialect makes of a body, all that is needed to serve it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from radixlm.api.caller import ANYBODY, Caller
from radixlm.api.hub import Hub
from radixlm.api.sse import SSE, Form, Framing
from radixlm.api.stream import Stream
from radixlm.base.request import Request


@dataclass(frozen=True, slots=True)
class Job:
    """
    Attributes:
        requests: one for each sequence of the answer, in the order of their indices.
        rid: the client's name for all of them.
        stream: events as they come, or one body.
        form: turns what the sequences say into the dialect.
        left: called once, when nobody hears the answer any more: it was told, or its client is gone.
        framing: how the events of a stream are told apart.
    """

    requests: tuple[Request, ...]
    rid: str
    stream: bool
    form: Form
    framing: Framing = SSE
    left: Callable[[], None] | None = None

    def submit(self, hub: Hub, caller: Caller = ANYBODY) -> Stream:
        """Send the requests to the engine. Raises as `Hub.submit`."""
        try:
            stream = hub.submit(caller.sign(self.requests), group=self.rid)
        except BaseException:
            if self.left is not None:
                self.left()
            raise
        stream.when_left = self.left
        return stream
