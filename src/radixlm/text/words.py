"""This module owns the search for any of many fixed words in a text, in time that does not grow with their number."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

_END = ""


def alternation(words: Iterable[str]) -> re.Pattern[str]:
    """A pattern that matches the longest of the words at the earliest place; none at all if there are no words.

    The words share their beginnings in the pattern. A plain `a|b|c` tries one word after the other at every place of
    the text, and vocabularies have thousands of control words that begin alike.
    """
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for char in word:
            node = node.setdefault(char, {})
        if word:
            node[_END] = {}
    return re.compile(_pattern(tree) if tree else r"(?!)")


def _pattern(node: dict[str, Any]) -> str:
    """The pattern of all words below `node`, each without what leads there."""
    branches = []
    for char, below in node.items():
        if char == _END:
            continue
        run = [char]
        while len(below) == 1 and _END not in below:  # no fork and no word ends here: go on without nesting
            ((following, below),) = below.items()
            run.append(following)
        branches.append(re.escape("".join(run)) + (_pattern(below) if set(below) != {_END} else ""))
    joined = branches[0] if len(branches) == 1 and _END not in node else f"(?:{'|'.join(branches)})"
    return joined + "?" if _END in node else joined
