"""This module owns `Job`: what a dialect makes of a body, all that is needed to serve it."""

from __future__ import annotations

from dataclasses import dataclass

from radixlm.api.sse import SSE, Form, Framing
from radixlm.base.request import Request


@dataclass(frozen=True, slots=True)
class Job:
    """
    Attributes:
        requests: one for each sequence of the answer, in the order of their indices.
        rid: the client's name for all of them.
        stream: events as they come, or one body.
        form: turns what the sequences say into the dialect.
        framing: how the events of a stream are told apart.
    """

    requests: tuple[Request, ...]
    rid: str
    stream: bool
    form: Form
    framing: Framing = SSE
