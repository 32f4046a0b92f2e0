"""This module owns the verb `radixlm bench programs`: which workloads and variants are run, and in what order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from radixlm.base.errors import StartupError
from radixlm.bench import plot, report
from radixlm.bench.options import add_engine, add_result, resolve_engine, writable
from radixlm.bench.programs import show
from radixlm.bench.programs.measure import Result, measure
from radixlm.bench.programs.table import VARIANTS, WORKLOADS
from radixlm.bench.programs.workload import Size, Words, Workload
from radixlm.config.cli import Parser
from radixlm.config.options import nearest
from radixlm.config.resolve import override
from radixlm.config.schema import Config


def parser() -> Parser:
    made = Parser(
        "radixlm bench programs",
        "Run programs of the front-end language, on an engine in this process: the whole system, and without one part "
        "after another. Texts are cut from real prose by a seed; lengths and sharing are those of the workloads named.",
        "radixlm bench programs [MODEL] [options]",
    )
    made.add_argument("argument", metavar="MODEL", nargs="?", help="the same as --model MODEL")
    group = made.add_argument_group("measurement")
    group.add_argument("--workloads", default="all", metavar="LIST", help=f"comma-separated: {', '.join(WORKLOADS)}")
    group.add_argument("--variants", default="all", metavar="LIST", help=f"comma-separated: {', '.join(VARIANTS)}")
    group.add_argument("--scale", type=float, default=1.0, metavar="X", help="times as many runs of each program (1)")
    group.add_argument("--plot", metavar="FILE", help="draw throughput and hit rates (PNG, SVG or PDF)")
    add_result(made)
    add_engine(made)
    return made


def main(argv: Sequence[str]) -> int:
    said = parser().parse(argv)
    workloads = _chosen(said.workloads, WORKLOADS, "--workloads")
    variants = _chosen(said.variants, VARIANTS, "--variants")
    path = writable(said.save_result, "--save-result")
    picture = writable(said.plot, "--plot")
    if picture is not None:
        plot.require(picture)
    if said.scale <= 0:
        raise StartupError(f"--scale is {said.scale:g}; it must be above 0")
    resolved = resolve_engine(said, said.argument)
    if resolved is None:
        return 0
    seed = resolved.config.model.random_seed or 0
    made = [WORKLOADS[name](Words(seed + number), Size(said.scale)) for number, name in enumerate(workloads)]
    results, engine = run(resolved.config, made, variants)
    show.table(results)
    show.summary(results)
    if path:
        figures = [result.figures() for result in results]
        abouts = {workload.name: workload.about for workload in made}
        settings = {"seed": seed, "scale": said.scale, "engine": engine, "workloads": abouts, "results": figures}
        report.save(path, report.document(settings, "programs", argv))
        print(f"result written to {path}")
    if picture is not None:
        show.draw(results, picture)
        print(f"plot written to {picture}")
    return 0


def run(config: Config, workloads: Sequence[Workload], variants: Sequence[str]) -> tuple[list[Result], object]:
    """(the results by workload and variant, what they were measured on). Variants that differ in how calls are sent
    alone share an engine.
    """
    from radixlm.llm import Engine

    results: dict[tuple[str, str], Result] = {}
    facts: object = None
    engines: dict[str, list[str]] = {}
    for name in variants:
        engines.setdefault(repr(sorted(VARIANTS[name].options.items())), []).append(name)
    for names in engines.values():
        options = {"max_queued_requests": 1 << 16, **VARIANTS[names[0]].options}
        with Engine(override(config, options)) as engine:
            facts = msgspec.to_builtins(engine.facts)
            engine.generate("warm up", {"max_new_tokens": 4, "temperature": 0.0})
            for workload in workloads:
                for name in names:
                    results[workload.name, name] = measure(engine, workload, name, VARIANTS[name])
    return [results[workload.name, name] for workload in workloads for name in variants], facts


def _chosen(said: str, known: Mapping[str, Any], flag: str) -> list[str]:
    if said == "all":
        return list(known)
    names = [name.strip() for name in said.split(",") if name.strip()]
    for name in names:
        if name not in known:
            hint = nearest(name, known)
            raise StartupError(f"{flag}: there is no {name!r}; " + (f"did you mean {hint}?" if hint else "see --help"))
    if not names:
        raise StartupError(f"{flag} names nothing")
    return names
