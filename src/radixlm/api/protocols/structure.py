"""This module owns how dialects other than OpenAI's ask for JSON: a schema, or any object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from radixlm.base.request import Grammar


def schema_grammar(schema: Mapping[str, Any], param: str) -> Grammar:
    """JSON that fits a schema. `param`: the field that has it, for errors."""
    return Grammar(kind="json_schema", text=msgspec.json.encode(schema).decode(), param=param)


def object_grammar(param: str) -> Grammar:
    """Any JSON object."""
    return Grammar(kind="json_object", text="", param=param)
