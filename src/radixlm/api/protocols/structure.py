"""This module owns how dialects other than OpenAI's ask for JSON: a schema, or any object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from radixlm.base.request import Grammar


def schema_grammar(schema: Mapping[str, Any]) -> Grammar:
    """JSON that fits a schema."""
    return Grammar(kind="json_schema", text=msgspec.json.encode(schema).decode())


def object_grammar() -> Grammar:
    """Any JSON object."""
    return Grammar(kind="json_object", text="")
