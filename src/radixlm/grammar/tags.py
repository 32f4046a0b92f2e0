"""This module owns structural tags as grammars: free text in which some tags open a JSON value.

The form that clients send: `{"type": "structural_tag", "structures": [{"begin": "<f>", "schema": {...}, "end":
"</f>"}], "triggers": ["<f"]}`. Text is free until a trigger appears; then one of the structures that begin with it
must follow.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from radixlm.grammar import check
from radixlm.grammar.base import GrammarError


class Structure(msgspec.Struct, frozen=True):
    begin: str
    end: str
    schema: dict[str, Any] | bool = {}


class StructuralTag(msgspec.Struct, frozen=True):
    structures: list[Structure]
    triggers: list[str]


def parse_tag(text: str) -> StructuralTag:
    """Raises `GrammarError` for a tag that is malformed, or of a form that is not served."""
    try:
        body = msgspec.json.decode(text)
        if isinstance(body, dict) and "format" in body and "structures" not in body:
            raise GrammarError("structural tags with `format` are not served; give `structures` and `triggers`")
        tag = msgspec.convert(body, StructuralTag)
    except msgspec.MsgspecError as error:
        raise GrammarError(f"the structural tag is malformed: {error}") from None
    if not tag.structures or not tag.triggers or not all(tag.triggers):
        raise GrammarError("a structural tag needs structures and triggers, and no trigger may be empty")
    for structure in tag.structures:
        if not any(structure.begin.startswith(trigger) for trigger in tag.triggers):
            raise GrammarError(f"structure {structure.begin[:40]!r} begins with none of the triggers")
    return tag


def to_lark(text: str) -> str:
    """The tag as a grammar in llguidance's dialect of Lark: a lazy lexeme ends with each trigger."""
    tag = parse_tag(text)
    rules = []
    options = []
    for i, trigger in enumerate(dict.fromkeys(tag.triggers)):
        bodies = []
        for structure in tag.structures:
            if not structure.begin.startswith(trigger):
                continue
            check.check_schema(structure.schema, check.LLGUIDANCE, "llguidance")
            check.common_patterns(structure.schema)
            rest, end = structure.begin[len(trigger) :], structure.end
            value = f"%json {json.dumps({} if structure.schema is True else structure.schema)}"
            bodies.append(" ".join(part for part in (_literal(rest), value, _literal(end)) if part))
        if not bodies:
            continue
        rules.append(f"trigger_{i}[lazy]: /(.|\\n)*/ {_literal(trigger)}")
        rules.append(f"tag_{i}: trigger_{i} ({' | '.join(f'({body})' for body in bodies)})")
        options.append(f"tag_{i}")
    lines = ["%llguidance {}", f"start: ({' | '.join(options)})* rest", "rest: /(.|\\n)*/", *rules]
    return "\n".join(lines) + "\n"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
