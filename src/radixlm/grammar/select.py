"""This module owns which library compiles a grammar: the one that the request names, else the operator's, else ours."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import lru_cache

from radixlm.base.errors import StartupError
from radixlm.base.registry import Entry, Registry
from radixlm.base.request import Grammar
from radixlm.grammar.base import Backend, GrammarError, Vocabulary

KINDS = frozenset({"json_schema", "json_object", "regex", "ebnf", "structural_tag", "choice"})


@dataclass(frozen=True, slots=True)
class Capabilities:
    """
    Attributes:
        kinds: of grammars that it can compile.
        requires: packages that must be installed.
    """

    kinds: frozenset[str]
    requires: tuple[str, ...] = ()


#: In order of preference.
BACKENDS: Registry[Capabilities] = Registry(
    "grammar backend",
    (Entry("llguidance", "radixlm.grammar.llguidance:LLGuidance", Capabilities(KINDS, ("llguidance",))),),
)


def choose(grammar: Grammar, configured: str) -> str:
    """The name of the backend for this grammar.

    Args:
        configured: `auto`, or the name of a backend that takes precedence over the order of preference.

    Raises:
        GrammarError: none can serve, or not the one asked for; the message says why.
    """
    if grammar.kind not in KINDS:
        raise GrammarError(f"unknown kind of grammar {grammar.kind!r}; known: {', '.join(sorted(KINDS))}")
    try:
        return BACKENDS.select(grammar.backend or configured, lambda entry: objection(entry, grammar.kind)).name
    except StartupError as error:
        raise GrammarError(error.message) from None


def objection(entry: Entry[Capabilities], kind: str) -> str | None:
    if kind not in entry.capabilities.kinds:
        return f"does not know {kind}"
    missing = [name for name in entry.capabilities.requires if importlib.util.find_spec(name) is None]
    return f"needs {', '.join(missing)}, which is not installed" if missing else None


@lru_cache(maxsize=4)
def load(name: str, vocabulary: Vocabulary) -> Backend:
    """The backend, ready to compile. Takes a while the first time: it reads the vocabulary."""
    backend: Backend = BACKENDS.get(name).load()(vocabulary)
    return backend
