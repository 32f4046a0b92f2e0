"""This module owns `--explain`: every value of a configuration with its origin and the reason for it, as text."""

from __future__ import annotations

from collections.abc import Mapping

from radixlm.config.cli import TITLES
from radixlm.config.options import OPTIONS
from radixlm.config.resolve import Resolved, to_flat


def explain(resolved: Resolved, derived: Mapping[str, tuple[str, str]]) -> str:
    """One line an option: name, value, origin, reason.

    Args:
        derived: option name -> (value, reason), from `resolve.derive`. What nobody gave and it does not hold is shown
            as `-`, with what will decide it at start.
    """
    values = to_flat(resolved.config)
    rows: list[tuple[str, str, str, str] | str] = []
    for owner, title in TITLES.items():
        rows.append(title)
        for option in OPTIONS:
            if option.owner != owner:
                continue
            value, origin, reason = option.show(values[option.name]), resolved.origins[option.name], option.help
            if option.name in derived:
                value, reason = derived[option.name]
                origin = "derived"
            elif values[option.name] is None:
                value, reason = "-", option.shown
            rows.append((option.key, value or '""', origin, reason))
    cells = [row for row in rows if isinstance(row, tuple)]
    widths = [max(len(row[column]) for row in cells) for column in range(3)]
    lines = []
    for row in rows:
        if isinstance(row, str):
            lines += ["", row]
        else:
            columns = [cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)]
            lines.append("  " + "  ".join((*columns, row[3])).rstrip())
    return "\n".join(lines[1:])
