"""The page on security lists every limit, with the value that holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from radixlm.api import keyfile, limits, sessions, sse, stream
from radixlm.api.auth import PUBLIC
from radixlm.api.protocols import responses_store
from radixlm.config.options import BY_NAME, OPTIONS
from radixlm.grammar import check, compiler
from radixlm.text import pattern, sandbox, stop, template
from radixlm.wire import codec

PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| ")]

UNITS = {"MiB": 1 << 20, "Mi": 1 << 20}


def numbers(text: str) -> set[float]:
    """The numbers of a cell, in plain units."""
    found = re.findall(r"([\d,.]*\d) ?(MiB|Mi)?", text)
    return {float(number.replace(",", "")) * UNITS.get(unit, 1) for number, unit in found}


def row(words: str) -> list[str]:
    (found,) = [row for row in ROWS if row[0] == words]
    return found


@pytest.mark.parametrize(
    "name",
    [option.name for option in OPTIONS if option.owner == "limits"]
    + ["queue_timeout", "request_timeout", "max_queued_requests"],
)
def test_every_option_that_limits_is_listed_with_its_default(name: str) -> None:
    option = BY_NAME[name]
    (found,) = [row for row in ROWS if option.flags[0] in row[3]]
    default = option.default
    assert isinstance(default, int | float)
    assert ("no limit" in found[2]) if default == 0 else (float(default) in numbers(found[2])), found


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ("one stop string", [stop.MAX_STOP_CHARS]),
        ("a stop pattern", [pattern.MAX_STATES, pattern.MAX_MATCH]),
        ("answer in one piece, while it is collected", [stream.WHOLE_BYTES]),
        ("stream that is not read", [stream.UNREAD_BYTES, sse.UNREAD_SECONDS]),
        ("its nesting; its lexer", [check.MAX_DEPTH, 50_000]),
        ("compiled grammars kept", [compiler.CACHE_BYTES]),
        ("chat template", [sandbox.MAX_SIZE]),
        ("control words in a prompt", [template.MAX_CONTROL_WORDS]),
        ("names (`rid`, `cache_salt`)", [limits.LONGEST_NAME]),
        ("sessions; turns of one", [sessions.MAX_SESSIONS, sessions.MAX_TURNS]),
        ("responses kept", [responses_store.MAX_RESPONSES, responses_store.MAX_BYTES]),
        ("file of keys", [keyfile.LONGEST_FILE]),
        ("message between processes", [codec.MAX_MESSAGE_BYTES]),
    ],
)
def test_fixed_limits_have_their_values(words: str, values: list[float]) -> None:
    assert set(map(float, values)) <= numbers(row(words)[2])


def test_the_open_routes_are_listed() -> None:
    sentence = PAGE[PAGE.index("Every route but") : PAGE.index("asks for the key")]
    assert set(re.findall(r"`(/\w+)`", sentence)) == PUBLIC
