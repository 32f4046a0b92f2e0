"""The option list is part of the interface: a change to it must be seen in the diff.

`python tests/rules/test_options.py > tests/rules/options.txt` renews the list, and
`radixlm serve --help-markdown > docs/cli.md` the reference.
"""

from __future__ import annotations

from pathlib import Path

from radixlm.cli.reference import reference
from radixlm.cli.serve import parser
from radixlm.config.options import OPTIONS

_HERE = Path(__file__).parent


def listing() -> str:
    lines = []
    for option in OPTIONS:
        kind = "|".join(option.choices) or option.kind.__name__
        lines.append(f"{option.owner}: {' '.join(option.flags)} {kind} = {option.default_text}\n")
    return "".join(lines)


def test_the_option_list_is_the_recorded_one() -> None:
    assert listing() == (_HERE / "options.txt").read_text(encoding="utf-8")


def test_serve_has_fewer_than_eighty_options() -> None:
    # An off switch belongs to its switch: one option.
    assert len({action.dest for action in parser()._actions}) < 80


def test_the_reference_in_the_docs_is_current() -> None:
    page = _HERE.parents[1] / "docs" / "cli.md"
    assert page.read_text(encoding="utf-8") == reference(), "radixlm serve --help-markdown > docs/cli.md"


if __name__ == "__main__":
    print(listing(), end="")
