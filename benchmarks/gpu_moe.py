#!/usr/bin/env python3
"""Mixtures of experts on one GPU: the fused kernels beside a naive loop, library products, and the floor.

    python benchmarks/gpu_moe.py                       # both shapes, several minutes: most of it compiles kernels
    python benchmarks/gpu_moe.py --quick               # only the ways that the rule chooses
    python benchmarks/gpu_moe.py --shapes mixtral-8x7b --early

Compared, from scores and hidden states to the sum over the experts of each token:

    loop       expert by expert: find its tokens, two products, add up. What a model file does; reads counts back
    library    the same products, on tokens sorted before the clock starts, and a sum: less work than is needed
    grouped    torch's grouped product in place of the loop over experts, where this torch has one
    ours       `radixlm.ops.triton_moe`, whole, with its routing and sorting; then its parts, each alone

All but the loop are replays of CUDA graphs that go round several sets of scores, so that other experts are read each
time. A figure is the median in microseconds; in brackets TFLOP/s, TB/s of the weights of the experts that have tokens,
and the share of the floor (reading these weights once, or computing, whichever takes longer, at rates that are measured
first). Scores are random: experts have about as many tokens each. The last part are lines for
`radixlm.ops.grouped.MEASURED`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from gpu_kernels import DEVICE, draw, timed
from triton.runtime.errors import OutOfResources

from radixlm.ops import gpu, grouped, triton_moe
from radixlm.ops.activation import SILU
from radixlm.ops.grouped import Shape, Tiles, Way
from radixlm.ops.moe import GpuMixture, route

SHAPES = {
    "qwen3-30b-a3b": Shape(experts=128, active=8, hidden=2048, inner=768),
    "mixtral-8x7b": Shape(experts=8, active=2, hidden=4096, inner=14336),
}
BATCHES = (1, 16, 64, 256, 4096)
#: Sets of scores that calls go round.
SETS = 8
#: Relative error in bf16 above which a result counts as wrong.
WRONG = 2e-2


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bytes and operations a second, measured."""

    bytes: float
    flops: float


def ceilings() -> Ceilings:
    x = draw(1 << 28)
    sums = torch.empty((), device=DEVICE, dtype=torch.float32)
    read = timed([lambda: torch.sum(x, dim=0, dtype=torch.float32, out=sums)])
    a, b = draw(8192, 8192), draw(8192, 8192)
    product = timed([lambda: a @ b])
    return Ceilings(x.nbytes / read * 1e6, 2 * 8192**3 / product * 1e6)


class Bench:
    """One shape with weights, and inputs of one size."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.gate_up = draw(shape.experts, 2 * shape.inner, shape.hidden).mul_(shape.hidden**-0.5)
        self.down = draw(shape.experts, shape.hidden, shape.inner).mul_(shape.inner**-0.5)

    def inputs(self, tokens: int) -> None:
        self.tokens = tokens
        self.x = draw(tokens, self.shape.hidden)
        self.scores = [draw(tokens, self.shape.experts) for _ in range(SETS)]
        self.routes = [route(scores, self.shape.active, True) for scores in self.scores]
        counts = [chosen.flatten().bincount(minlength=self.shape.experts) for chosen, _ in self.routes]
        self.counts = [each.tolist() for each in counts]
        self.ends = [each.cumsum(0).int() for each in counts]
        orders = [chosen.flatten().argsort(stable=True) for chosen, _ in self.routes]
        self.rows = [order.div(self.shape.active, rounding_mode="floor") for order in orders]
        self.back = [order.argsort() for order in orders]
        shape = self.shape
        self.flops = 6.0 * tokens * shape.active * shape.hidden * shape.inner
        used = sum(sum(count > 0 for count in each) for each in self.counts) / SETS
        self.bytes = used * 3 * shape.hidden * shape.inner * 2

    # ---- what is compared

    def loop(self, index: int) -> torch.Tensor:
        """As a model file would write it."""
        chosen, weights = route(self.scores[index], self.shape.active, True)
        out = torch.zeros_like(self.x)
        for expert in chosen.unique().tolist():
            token, place = torch.where(chosen == expert)
            gate, up = F.linear(self.x[token], self.gate_up[expert]).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, self.down[expert]) * weights[token, place, None]
            out.index_add_(0, token, y.to(out.dtype))
        return out

    def library(self, index: int) -> torch.Tensor:
        rows = self.x.index_select(0, self.rows[index])
        parts, start = torch.empty_like(rows), 0
        for expert, count in enumerate(self.counts[index]):
            if count:
                gate, up = F.linear(rows[start : start + count], self.gate_up[expert]).chunk(2, -1)
                torch.mm(F.silu(gate) * up, self.down[expert].t(), out=parts[start : start + count])
                start += count
        return self._sum(parts, index)

    def grouped(self, index: int) -> torch.Tensor:
        rows = self.x.index_select(0, self.rows[index])
        both = torch._grouped_mm(rows, self.gate_up.transpose(1, 2), offs=self.ends[index])
        gate, up = both.chunk(2, -1)
        parts = torch._grouped_mm(F.silu(gate) * up, self.down.transpose(1, 2), offs=self.ends[index])
        return self._sum(parts, index)

    def ours(self, index: int, way: Way) -> torch.Tensor:
        y: torch.Tensor = triton_moe.mixture(
            self.x, self.scores[index], self.gate_up, self.down, way, active=self.shape.active, renormalise=True,
            activation="silu",
        )  # fmt: skip
        return y

    def layer(self, index: int) -> torch.Tensor:
        """With the tiles of `grouped.choose`."""
        mixture = GpuMixture(self.gate_up, self.down, self.shape.active, True, SILU)
        return mixture(self.x, self.scores[index])

    def _sum(self, parts: torch.Tensor, index: int) -> torch.Tensor:
        parts = parts.index_select(0, self.back[index]).view(self.tokens, self.shape.active, -1)
        return torch.einsum("tkn,tk->tn", parts, self.routes[index][1].to(parts.dtype))

    # ---- how

    def replayed(self, call: Callable[[int], object]) -> float:
        return timed([lambda index=index: call(index) for index in range(SETS)])  # type: ignore[misc]

    def eager(self, call: Callable[[int], object]) -> float:
        """For what a graph cannot hold."""
        call(0)
        took = []
        for index in range(SETS):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            call(index)
            torch.cuda.synchronize()
            took.append((time.perf_counter() - begin) * 1e6)
        return sorted(took)[len(took) // 2]

    def error(self, got: torch.Tensor) -> float:
        """Of some tokens under the first scores, relative, against float32."""
        some = torch.arange(0, self.tokens, max(1, self.tokens // 16), device=DEVICE)
        chosen, weights = self.routes[0]
        rows = []
        for token in some.tolist():
            x, y = self.x[token].float(), 0.0
            for expert, weight in zip(chosen[token].tolist(), weights[token], strict=True):
                gate, up = F.linear(x, self.gate_up[expert].float()).chunk(2)
                y = y + weight * F.linear(F.silu(gate) * up, self.down[expert].float())
            rows.append(y)
        expected = torch.stack(rows)
        found = float((got[some].float() - expected).norm() / expected.norm())
        return found if found == found else float("inf")

    def products(self, way: Way) -> tuple[float, float]:
        """Microseconds of the two products, each alone."""
        sets = []
        for scores in self.scores:
            routed = triton_moe.route(scores, self.shape.active, True)
            sets.append((triton_moe.place(routed, self.shape, way.tokens), routed.weights))
        entries = self.tokens * self.shape.active
        middle, parts = draw(entries, self.shape.inner), draw(entries, self.shape.hidden)
        size, active = way.tokens, self.shape.active

        def first(index: int) -> None:
            triton_moe._grouped(self.x, self.gate_up, None, middle, sets[index][0], size, way.gate_up, active, "silu")

        def second(index: int) -> None:
            placed, weights = sets[index]
            triton_moe._grouped(middle, self.down, weights, parts, placed, size, way.down, 1, None)

        return self.replayed(first), self.replayed(second)

    def routing(self, way: Way) -> float:
        def call(index: int) -> None:
            triton_moe.place(triton_moe.route(self.scores[index], self.shape.active, True), self.shape, way.tokens)

        return self.replayed(call)


def candidates(tokens: int, shape: Shape) -> list[Way]:
    """Ways with block sizes around the rule's. The products are timed apart, so both may have the same tiles."""
    rule = grouped.choose(tokens, shape)
    sizes = [size for size in (rule.tokens // 2, rule.tokens, rule.tokens * 2) if 16 <= size <= 128]
    found = [rule]
    for size in sizes:
        if size == 16:
            tiles = [Tiles(16, 256, 2), Tiles(32, 128), Tiles(32, 256, 4, 3), Tiles(64, 128), Tiles(64, 64, 4, 5)]
        elif size < 128:
            tiles = [Tiles(64, 64), Tiles(64, 128, 4, 3), Tiles(128, 64, 4, 3), Tiles(128, 64, 8)]
        else:
            tiles = [Tiles(64, 64), Tiles(128, 64, 8, 3), Tiles(128, 64, 8), Tiles(128, 32, 8, 5)]
        found += [Way(size, each, each) for each in tiles]
    return list(dict.fromkeys(found))


def best_way(bench: Bench, wrong: list[str]) -> Way:
    """The best tiles of each product for each block size, then the best block size, timed as a whole."""
    timings: dict[int, list[tuple[float, float, Way]]] = {}
    for way in candidates(bench.tokens, bench.shape):
        try:
            error = bench.error(bench.ours(0, way))
            if error > WRONG:
                wrong.append(f"{bench.shape} {bench.tokens} {way}: relative error {error:.1e}")
                continue
            timings.setdefault(way.tokens, []).append((*bench.products(way), way))
        except OutOfResources:  # more shared memory than there is
            continue
    whole = {}
    for size, rows in timings.items():
        way = Way(size, min(rows, key=lambda row: row[0])[2].gate_up, min(rows, key=lambda row: row[1])[2].down)
        whole[way] = bench.replayed(lambda index, way=way: bench.ours(index, way))  # type: ignore[misc]
    return min(whole, key=whole.__getitem__)


def short(way: Way) -> str:
    def tiles(each: Tiles) -> str:
        values = [repr(value) for value in astuple(each)]
        while len(values) > 2 and values[-1] == repr(fields(each)[len(values) - 1].default):
            values.pop()
        return f"Tiles({', '.join(values)})"

    return f"Way({way.tokens}, {tiles(way.gate_up)}, {tiles(way.down)})"


def measure(name: str, tops: Ceilings, quick: bool, out: Path | None) -> tuple[str, list[str]]:
    """A line for `MEASURED`, and what was wrong."""
    bench, wrong = Bench(SHAPES[name]), list[str]()
    steps: list[tuple[int, Way]] = []
    for tokens in BATCHES:
        bench.inputs(tokens)
        floor = max(bench.bytes / tops.bytes, bench.flops / tops.flops) * 1e6
        print(f"\n{name}, {tokens} tokens: {bench.bytes / 1e6:.0f} MB of weights, floor {floor:.1f} us")
        way = grouped.choose(tokens, bench.shape) if quick else best_way(bench, wrong)
        rows: dict[str, float] = {"loop": bench.eager(bench.loop)}
        calls: dict[str, Callable[[int], torch.Tensor]] = {"library": bench.library}
        if hasattr(torch, "_grouped_mm"):
            calls["grouped"] = bench.grouped
        calls["ours"] = lambda index, way=way: bench.ours(index, way)  # type: ignore[misc]
        for title, call in calls.items():
            try:
                if (error := bench.error(call(0))) > WRONG:
                    wrong.append(f"{name} {tokens} {title}: relative error {error:.1e}")
                rows[title] = bench.replayed(call)
            except RuntimeError as problem:
                if title != "grouped":
                    raise
                print(f"  grouped: {str(problem).splitlines()[0]}")
        rows["ours, as the engine chooses"] = bench.replayed(bench.layer)
        rows["  route and place"] = bench.routing(way)
        rows["  gate, up and gating"], rows["  down"] = bench.products(way)
        for title, took in rows.items():
            rates = f"({bench.flops / took / 1e6:.0f} TFLOP/s, {bench.bytes / took / 1e6:.2f} TB/s, {floor / took:.0%})"
            print(f"  {title:<30}{took:>12.1f}  {'' if title.startswith('  ') else rates}", flush=True)
            if out is not None:
                note = {"shape": name, "tokens": tokens, "what": title.strip(), "us": took, "floor_us": floor}
                with out.open("a") as file:
                    file.write(json.dumps({**note, "way": short(way)}) + "\n")
        print(f"  {short(way)}")
        steps.append((tokens, way))
    return entry(bench.shape, steps), wrong


def entry(shape: Shape, steps: Sequence[tuple[int, Way]]) -> str:
    """Equal ways as one; a way serves up to the middle, on a scale of doublings, between its size and the next."""
    lines = []
    for way, group in itertools.groupby(enumerate(steps), key=lambda item: item[1][1]):
        last, (tokens, _) = list(group)[-1]
        most = tokens if last + 1 == len(steps) else round((tokens * steps[last + 1][0]) ** 0.5)
        lines.append(f"({most}, {short(way)})")
    return f"    {shape}: ({', '.join(lines)},),"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--early", action="store_true", help="every kernel starts while the one before it ends")
    parser.add_argument("--out", type=Path, help="file for one JSON line per figure")
    args = parser.parse_args()
    gpu.EARLY = args.early
    torch.manual_seed(0)
    begin = time.monotonic()
    with torch.inference_mode():
        tops = ceilings()
        print(f"ceilings: {tops.bytes / 1e12:.2f} TB/s, {tops.flops / 1e12:.0f} TFLOP/s; early starts {args.early}")
        found = [measure(name, tops, args.quick, args.out) for name in args.shapes.split(",")]
    print("\n".join(["", "MEASURED", *(line for line, _ in found)]))
    wrong = [line for _, bad in found for line in bad]
    print("\n".join(["", "WRONG", *wrong] if wrong else ["", f"all agree; {time.monotonic() - begin:.0f} s"]))


if __name__ == "__main__":
    main()
