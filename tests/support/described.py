"""Requests made of the API's own description by schemathesis."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.config import SchemathesisConfig

from radixlm.api.reference.openapi import document
from radixlm.api.reference.table import TABLE

#: (method, path) of every route, without those that are other names of one.
OPERATIONS = [(entry.method.lower(), entry.paths.split()[0]) for entry in TABLE]

#: (method, path, body) -> status.
Send = Callable[[str, str, bytes | None], int]


def check_operation(
    method: str, path: str, examples: int, send: Send, change: Callable[[Any], Any] = lambda body: body
) -> None:
    """Send so many requests that fit the description and as many that do not. No answer may be a 5xx.

    Args:
        change: what is done to a body that is an object before it is sent.
    """
    with_body = "requestBody" in document()["paths"][path][method]
    operation = schemathesis.openapi.from_dict(document(), config=SchemathesisConfig())[path][method.upper()]
    # Where there is no body there is nothing to get wrong.
    for mode in GenerationMode if with_body else (GenerationMode.POSITIVE,):

        @settings(
            max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True,
            phases=(Phase.generate,), database=None,
        )  # fmt: skip
        @given(operation.as_strategy(generation_mode=mode), st.booleans())
        def run(case: Any, known: bool) -> None:
            request = case.as_transport_kwargs(base_url="http://test")
            body = request["json"] if "json" in request else request.get("data")
            if isinstance(body, dict):
                if known:
                    body["model"] = "tiny"
                body = change(body)
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            place = request["url"].removeprefix("http://test") or "/"
            assert send(method.upper(), place, data) < 500, request

        try:
            run()
        except Unsatisfiable:  # a request without a body and parameters cannot be wrong
            assert mode is GenerationMode.NEGATIVE
