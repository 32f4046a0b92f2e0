"""This module owns `radixlm bench`: which benchmarks there are. Each is imported only when it is asked for."""

from __future__ import annotations

import importlib
import types
from collections.abc import Mapping, Sequence
from typing import Final

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
        "programs": (
            "radixlm.bench.programs.main",
            "programs that call a model many times, with and without each part of the system",
        ),
        "one-batch": ("radixlm.bench.one_batch", "latency of the steps of one batch, beside the floor of this machine"),
    }
)


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
