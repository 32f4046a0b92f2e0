"""This module owns `radixlm bench`: which benchmarks there are. Each is imported only when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import types
from collections.abc import Mapping, Sequence
from typing import Any, Final

from radixlm.base.errors import StartupError
from radixlm.config.cli import Parser
from radixlm.config.options import nearest

#: Kind -> (module with `main(argv) -> exit code`, what it measures).
KINDS: Final[Mapping[str, tuple[str, str]]] = types.MappingProxyType(
    {
        "serve": ("radixlm.bench.serve", "a load on an OpenAI-compatible server: latencies, throughput, goodput"),
        "offline": (
            "radixlm.bench.offline",
            "throughput of an engine in this process, with and without the radix cache",
        ),
        "one-batch": ("radixlm.bench.one_batch", "latency of the steps of one batch, beside the floor of this machine"),
    }
)


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the verb `bench` to a command line; `func` of what it parses runs it."""
    listing = "; ".join(f"{kind}: {text}" for kind, (_, text) in KINDS.items())
    parser = subparsers.add_parser("bench", description=f"Measure. {listing}.", usage="radixlm bench KIND [options]")
    parser.add_argument("kind", metavar="KIND", help=f"one of {', '.join(KINDS)}; KIND --help lists its options")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(func=lambda said: main([said.kind, *said.rest]))


def main(argv: Sequence[str]) -> int:
    """Run one benchmark: `argv` is its kind and its options."""
    if not argv or argv[0] in ("-h", "--help"):
        Parser("radixlm bench", "Measure.", "radixlm bench KIND [options]").print_usage()
        for kind, (_, text) in KINDS.items():
            print(f"  {kind:10} {text}")
        return 0
    kind, *rest = argv
    if kind not in KINDS:
        hint = nearest(kind, KINDS)
        known = f"did you mean {hint}?" if hint else f"there are {', '.join(KINDS)}"
        raise StartupError(f"unknown benchmark {kind!r}; {known}")
    target, _ = KINDS[kind]
    return int(importlib.import_module(target).main(rest))
