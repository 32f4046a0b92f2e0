"""This module owns `radixlm bench one-batch`: the latency of the steps of one batch, without scheduler or server."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import msgspec

from radixlm.base.errors import StartupError
from radixlm.base.facts import EngineFacts
from radixlm.bench import report
from radixlm.bench.batch import Shape, run_batch
from radixlm.bench.floors import Ceilings, measure_ceilings, work
from radixlm.bench.options import add_engine, add_result, resolve_engine, writable
from radixlm.bench.summary import Distribution
from radixlm.config.cli import Parser

if TYPE_CHECKING:
    from radixlm.runner.base import Executor


@dataclass(frozen=True, slots=True)
class Result:
    """One batch, measured `repeats` times. Seconds.

    Attributes:
        prefill: all prompts of the batch, to their first tokens.
        decode: steps after that; None if there are none.
        prefill_floor, decode_floor: the least this machine needs (the decode step at the mean context); None if its
            ceilings were not measured.
    """

    shape: Shape
    prefill: Distribution
    decode: Distribution | None
    prefill_floor: float | None = None
    decode_floor: float | None = None

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second."""
        return self.shape.batch * self.shape.input_len / self.prefill.median

    @property
    def decode_rate(self) -> float | None:
        """Generated tokens a second, of all rows together."""
        return self.shape.batch / self.decode.median if self.decode else None


def parser() -> Parser:
    made = Parser(
        "radixlm bench one-batch",
        "Run one batch through the model, step by step: no scheduler, no cache, no server. Random prompts.",
        "radixlm bench one-batch [MODEL] [options]",
    )
    made.add_argument("argument", metavar="MODEL", nargs="?", help="the same as --model MODEL")
    group = made.add_argument_group("batch")
    for flag, default, text in (
        ("--batch-size", 1, "prompts"),
        ("--input-len", 256, "tokens of a prompt"),
        ("--output-len", 32, "tokens generated for each"),
    ):
        group.add_argument(
            flag, type=int, nargs="+", default=[default], metavar="N", help=f"{text}; several are combined ({default})"
        )
    group = made.add_argument_group("measurement")
    group.add_argument("--repeats", type=int, default=5, metavar="N", help="batches of each shape, after a warm-up (5)")
    group.add_argument("--floors", action="store_true", help="measure bandwidth and GEMM rate, show their floors")
    add_result(made)
    add_engine(made)
    return made


def main(argv: Sequence[str]) -> int:
    said = parser().parse(argv)
    path = writable(said.save_result, "--save-result")
    resolved = resolve_engine(said, said.argument)
    if resolved is None:
        return 0
    if said.repeats < 1:
        raise StartupError(f"--repeats is {said.repeats}; it must be at least 1")
    from radixlm.launch.ranks import started

    with started(resolved.config, lambda stage, fraction: None, lambda reason: None) as booted:
        facts = booted.facts
        shapes = [Shape(*sizes) for sizes in itertools.product(said.batch_size, said.input_len, said.output_len)]
        for shape in shapes:
            shape.check(facts)
        budget = booted.config.schedule.max_prefill_tokens
        assert budget is not None, "filled at boot"
        seed = resolved.config.model.random_seed or 0
        ceilings = _ceilings(facts) if said.floors else None
        results = [measure(booted.runner, shape, budget, said.repeats, seed, ceilings) for shape in shapes]
    title = f"{facts.model.name}, {facts.model.dtype}, {facts.device.name}, {facts.device.threads} threads"
    _show(title, results, ceilings)
    if path:
        settings = {
            "engine": msgspec.to_builtins(facts),
            "seed": seed,
            "tokens_per_step": budget,
            "ceilings": asdict(ceilings) if ceilings else None,
            "batches": [asdict(result) for result in results],
        }
        report.save(path, report.document(settings, "one-batch", argv))
        print(f"result written to {path}")
    return 0


def measure(
    executor: Executor, shape: Shape, budget: int, repeats: int, seed: int, ceilings: Ceilings | None = None
) -> Result:
    """Run batches of one shape, the first unmeasured.

    Args:
        budget: prompt tokens of a step.
        ceilings: of the machine, for the floors.
    """
    run_batch(executor, shape, budget, seed)
    batches = [run_batch(executor, shape, budget, seed + 1 + i) for i in range(repeats)]
    prefill = Distribution.of(sum(step.seconds for step in steps) for steps, _ in batches)
    decode = Distribution.of(step.seconds for _, steps in batches for step in steps)
    assert prefill is not None
    if ceilings is None:
        return Result(shape, prefill, decode)
    least = [[work(executor.facts.model, step.plan).seconds(ceilings) for step in steps] for steps in batches[0]]
    return Result(shape, prefill, decode, sum(least[0]), statistics.fmean(least[1]) if least[1] else None)


def _ceilings(facts: EngineFacts) -> Ceilings:
    if facts.device.kind == "null":
        raise StartupError("--floors needs a device that computes; the null device has no ceilings")
    import torch

    from radixlm.device.select import choose, open_device

    device = open_device(choose(facts.device.kind))
    return measure_ceilings(device, getattr(torch, facts.model.dtype), facts.model.weight_bytes)


def _show(title: str, results: Sequence[Result], ceilings: Ceilings | None) -> None:
    headings = ["batch x in + out", "prefill ms", "p90", "tok/s", "decode ms", "p90", "tok/s"]
    if ceilings:
        headings[4:4] = ["floor ms", "share"]
        headings += ["floor ms", "share"]
        title += f"; {ceilings.bandwidth / 1e9:.1f} GB/s, {ceilings.flops / 1e9:.0f} GFLOP/s"
    rows = []
    for result in results:
        shape = result.shape
        cells = [f"{shape.batch} x {shape.input_len} + {shape.output_len}"]
        for measured, rate, floor in (
            (result.prefill, result.prefill_rate, result.prefill_floor),
            (result.decode, result.decode_rate, result.decode_floor),
        ):
            cells += _cells(measured, rate, floor, len(headings) // 2)
        rows.append(cells)
    report.grid(title, headings, rows)


def _cells(measured: Distribution | None, rate: float | None, floor: float | None, width: int) -> list[str]:
    if measured is None or rate is None:
        return ["-"] * width
    cells = [f"{measured.median * 1e3:.2f}", f"{measured.p90 * 1e3:.2f}", f"{rate:.1f}"]
    if floor is not None:
        cells += [f"{floor * 1e3:.2f}", f"{floor / measured.median:.0%}"]
    return cells
