"""This module owns the flags that the benchmark verbs share: the workload, the engine, and where results go."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

from radixlm.base.errors import StartupError
from radixlm.bench import datasets
from radixlm.bench.datasets import Spec
from radixlm.config import cli, env
from radixlm.config.cli import Parser
from radixlm.config.explain import explain
from radixlm.config.resolve import Given, Resolved, derive

#: Field of `Spec` -> (other names of its flag, what it says).
_COUNTS: Final = {
    "count": (("--n",), "requests; conversations of multi-turn"),
    "input_len": (("--input-len",), "random, multi-turn: prompt tokens of a request, of a turn"),
    "output_len": (("--output-len", "--gsp-output-len"), "answer tokens, at most"),
    "groups": (("--gsp-num-groups",), "shared-prefix: prefixes that the requests are dealt to"),
    "shared_len": (("--gsp-system-prompt-len",), "shared-prefix: tokens of a prefix"),
    "own_len": (("--gsp-question-len",), "shared-prefix: tokens of a request after its prefix"),
    "turns": ((), "multi-turn: requests of a conversation, each with all before it as its prefix"),
}

#: Weaker than anything the user says: a benchmark's output is its table.
_QUIET: Final = {
    "log_level": Given("warning", "default of this verb", "log_level"),
    "log_stats_interval": Given(0.0, "default of this verb", "log_stats_interval"),
}


def add_workload(parser: Parser) -> None:
    """Give a parser the flags of `Spec`."""
    default = Spec()
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--dataset-name",
        choices=(*datasets.NAMES, *datasets.SYNONYMS),
        default=default.name,
        metavar="{" + ",".join(datasets.NAMES) + "}",
        help=f"what is asked ({default.name})",
    )
    group.add_argument("--dataset-path", metavar="FILE", help="custom: JSON lines with a prompt each, or ShareGPT JSON")
    for field, (synonyms, text) in _COUNTS.items():
        value = getattr(default, field)
        names = (datasets.COUNTS[field], *synonyms)
        group.add_argument(*names, dest=field, type=int, metavar="N", default=value, help=f"{text} ({value})")
    group.add_argument(
        "--random-range-ratio",
        "--range-ratio",
        dest="range_ratio",
        type=float,
        metavar="X",
        default=default.range_ratio,
        help=f"random: lengths are uniform between this share of the given ones and all ({default.range_ratio:g})",
    )


def spec_of(said: argparse.Namespace, seed: int, *, as_text: bool) -> Spec:
    """The workload that was asked for, checked."""
    spec = Spec(
        name=datasets.SYNONYMS.get(said.dataset_name, said.dataset_name),
        path=said.dataset_path,
        range_ratio=said.range_ratio,
        seed=seed,
        as_text=as_text,
        **{field: getattr(said, field) for field in _COUNTS},
    )
    spec.check()
    return spec


def add_result(parser: Parser) -> None:
    parser.add_argument(
        "--save-result",
        "--output-file",
        dest="save_result",
        metavar="FILE",
        help="write the result as JSON, with the command, versions and seed",
    )


def writable(said: str | None, flag: str) -> Path | None:
    """Where a file that was asked for goes; refused before anything is measured if it cannot go there."""
    if said is None:
        return None
    path = Path(said)
    if path.is_dir() or not path.parent.is_dir():
        raise StartupError(f"{flag} {path}: no file can be written there")
    return path


def add_engine(parser: Parser) -> None:
    """Give a parser the options of an engine; those of its log and the like are accepted without being listed."""
    cli.add_options(parser, owners=cli.ENGINE, shown=("model", "device", "cache", "schedule"))


def resolve_engine(said: argparse.Namespace, model: str | None) -> Resolved | None:
    """The configuration of the engine to measure, or None when `--explain` has been answered instead."""
    resolved = cli.read(said, model, _QUIET)
    for warning in env.strays():
        print(f"radixlm: warning: {warning}", file=sys.stderr)
    if not said.explain:
        return resolved
    from radixlm.device.select import choose

    kind = resolved.config.device.device
    _, reasons = derive(resolved.config, choose("auto").name if kind == "auto" else kind)
    print(explain(resolved, reasons))
    return None
