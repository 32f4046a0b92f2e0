#!/usr/bin/env python3
"""Kernels of a decode step, each alone: ours beside the library's, and the best way to multiply for every weight.

    python benchmarks/gpu_kernels.py              # both shapes, about a minute on one GPU
    python benchmarks/gpu_kernels.py --early      # every kernel starts while the one before it ends

Each figure is the median of replays of a CUDA graph with many launches. The launches go round copies of the weight that
together exceed the L2 cache several times, so that every one reads it from memory. A product is timed with what goes
with it: qkv and gate_up with the norm before, gate_up with the gating behind, o and down with the addition to the
residual. Weights and inputs are random. The last part of the output are lines for `radixlm.ops.thin.MEASURED`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from gpu_ways import SHAPES, Product, Shape, products, short, ways

from radixlm.ops import gpu
from radixlm.ops.thin import Vector, Way

BATCHES = (1, 2, 4, 8, 16, 64, 256)
DEVICE = "cuda"
#: Bytes that launches go round: several times the L2 cache of a large GPU.
ROUND = 256 << 20
#: Relative error of a product in bf16 above which it counts as wrong.
WRONG = 1e-2

Call = Callable[[], object]


# ---- what is measured


class Bench:
    """The tensors of one product, on the GPU."""

    def __init__(self, product: Product, copies: int | None = None) -> None:
        self.product = product
        count = max(2, min(64, -(-ROUND // product.bytes))) if copies is None else copies
        size = (product.outputs, product.inputs)
        self.weights = [draw(*size).mul_(product.inputs**-0.5) for _ in range(count)]
        self.gain = draw(product.inputs)
        self.gain32 = self.gain.float()
        self.eps = torch.full((1,), 1e-5, device=DEVICE)
        self.counts = torch.zeros(-(-product.outputs // 16), dtype=torch.int32, device=DEVICE)

    def call(self, weight: torch.Tensor, x: torch.Tensor, into: torch.Tensor | None, way: Way | None) -> torch.Tensor:
        """The product with what goes with it; `way` None: the library, as the engine uses it."""
        product = self.product
        inside = product.normed and isinstance(way, Vector) and way.norm
        if product.normed and not inside:
            x = elementwise().rms_norm(x, self.gain32, self.eps)
        if way is not None:
            gain, eps = (self.gain, self.eps) if inside else (None, None)
            y: torch.Tensor = gpu.products().product(
                x, weight, way, gain=gain, eps=eps, gated=product.gated, into=into, counts=self.counts
            )
            return y
        if into is not None:
            return into.addmm_(x, weight.t())
        y = F.linear(x, weight)
        return elementwise().silu_mul(y) if product.gated else y

    def time(self, tokens: int, way: Way | None) -> float:
        x = draw(tokens, self.product.inputs)
        into = draw(tokens, self.product.results) if self.product.added else None
        return timed([lambda w=w: self.call(w, x, into, way) for w in self.weights])  # type: ignore[misc]

    def error(self, tokens: int, way: Way) -> float:
        """Relative, against everything in float32."""
        product, weight = self.product, self.weights[0]
        x, into = draw(tokens, product.inputs), draw(tokens, product.results) if product.added else None
        wide = x.float()
        if product.normed:
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps) * self.gain32
        y = F.linear(wide, weight.float())
        if product.gated:
            gate, up = y.chunk(2, -1)
            y = F.silu(gate) * up
        if into is not None:
            y = y + into
        got = self.call(weight, x, into, way).float()
        error = float((got - y).norm() / y.norm())
        return error if error == error else float("inf")


def elementwise() -> ModuleType:
    from radixlm.ops import triton_kernels

    return triton_kernels


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def timed(calls: Sequence[Call], least: int = 16) -> float:
    """Microseconds a call: a graph of all of them, at least `least` launches, its median replay."""
    calls = list(calls) * -(-least // len(calls))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    took = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        took.append(begin.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(took)


def layer_calls(shape: Shape, benches: Sequence[Bench], tokens: int, best: dict[str, Way | None] | None) -> list[Call]:
    """One layer without its attention, on each copy of the weights. `best` None: separate ops and the library."""
    kernels = elementwise()
    heads = shape.heads + 2 * shape.kv_heads
    rotated = shape.heads + shape.kv_heads
    cos, sin = (draw(tokens, 1, shape.dim) for _ in range(2))
    norm = Norm(draw(rotated, shape.dim, dtype=torch.float32), benches[0].eps)
    keys, values = (draw(shape.kv_heads, 4096, shape.dim).transpose(0, 1) for _ in range(2))
    slots = torch.randperm(4096, device=DEVICE)[:tokens]
    stream, attended = draw(tokens, shape.hidden), draw(tokens, shape.heads * shape.dim)
    qkv, o, gate_up, down = benches[:4]

    def run(index: int) -> None:
        def call(bench: Bench, x: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
            way = None if best is None else best[bench.product.name]
            return bench.call(bench.weights[index % len(bench.weights)], x, into, way)

        made = call(qkv, stream).view(tokens, heads, shape.dim)
        if best is None:
            qk = made[:, :rotated]
            if shape.head_norm:
                qk = kernels.rms_norm(qk, norm.weight, norm.eps)
            kernels.rotate_(qk, cos, sin)
            kernels.write_kv(keys, values, slots, qk[:, shape.heads :], made[:, rotated:])
        else:
            kernels.prepare_qkv(made, cos, sin, norm if shape.head_norm else None, slots, keys, values)
        call(o, attended, stream)
        call(down, call(gate_up, stream), stream)

    return [lambda index=index: run(index) for index in range(max(len(bench.weights) for bench in benches[:4]))]  # type: ignore[misc]


@dataclass(frozen=True, slots=True)
class Norm:
    weight: torch.Tensor
    eps: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = elementwise().rms_norm(x, self.weight, self.eps)
        return y


def small_kernels(shape: Shape, tokens: int) -> dict[str, tuple[list[Call], list[Call]]]:
    """name -> (separate or PyTorch's, ours), over inputs that need not come from memory."""
    kernels = elementwise()
    heads, rotated = shape.heads + 2 * shape.kv_heads, shape.heads + shape.kv_heads
    eps = torch.full((1,), 1e-5, device=DEVICE)
    norm = Norm(draw(rotated, shape.dim, dtype=torch.float32), eps) if shape.head_norm else None
    qkv, cos, sin = draw(tokens, heads, shape.dim), draw(tokens, 1, shape.dim), draw(tokens, 1, shape.dim)
    keys, values = (draw(shape.kv_heads, 4096, shape.dim).transpose(0, 1) for _ in range(2))
    slots = torch.randperm(4096, device=DEVICE)[:tokens]
    x, gain = draw(tokens, shape.hidden), draw(shape.hidden)
    gain32 = gain.float()
    both = draw(tokens, 2 * shape.inner)
    scores = draw(tokens, shape.vocab)

    def separate() -> None:
        qk = qkv[:, :rotated] if norm is None else norm(qkv[:, :rotated])
        kernels.rotate_(qk, cos, sin)
        kernels.write_kv(keys, values, slots, qk[:, shape.heads :], qkv[:, rotated:])

    def best() -> None:
        top, tokens = scores.max(-1)
        status = torch.where(top.float().abs() < 1e30, 0, 1)
        torch.where(status == 0, tokens, 0), status.to(torch.int8)

    def gating() -> torch.Tensor:
        gate, up = both.chunk(2, -1)
        return F.silu(gate) * up

    return {
        "norm, rotary, KV write": (
            [separate],
            [lambda: kernels.prepare_qkv(qkv, cos, sin, norm, slots, keys, values)],
        ),
        "rms_norm": (
            [lambda: F.rms_norm(x, (shape.hidden,), gain, 1e-5)],
            [lambda: kernels.rms_norm(x, gain32, eps)],
        ),
        "silu and multiply": ([gating], [lambda: kernels.silu_mul(both)]),
        "best of a row": ([best], [lambda: kernels.best(scores, 1e30, 1)]),
    }


# ---- the run


def everything(shapes: Sequence[str]) -> list[tuple[Product, int, Way]]:
    found = []
    for name in shapes:
        for product in products(SHAPES[name]):
            tried = dict.fromkeys((way, tokens) for tokens in BATCHES for way in ways(product, tokens))
            for way, tokens in tried:
                found.append((product, tokens, way))
                if product.normed and isinstance(way, Vector):
                    found.append((product, tokens, replace(way, norm=False)))
    return found


def compile_part(shapes: Sequence[str], part: int, parts: int) -> None:
    """Run a share of the kernels once, so that they are in Triton's cache on disk. Weights are made per product."""
    bench: Bench | None = None
    for product, tokens, way in everything(shapes)[part::parts]:
        if bench is None or bench.product != product:
            bench = None  # frees its memory first
            bench = Bench(product, copies=1)
        bench.error(tokens, way)


def compile_all(shapes: Sequence[str], early: bool) -> None:
    parts = max(1, min(12, (os.cpu_count() or 2) - 2))
    base = [sys.executable, __file__, "--shapes", ",".join(shapes), *(["--early"] if early else [])]
    children = [subprocess.Popen([*base, "--compile", f"{part}/{parts}"]) for part in range(parts)]
    failed = [child.args for child in children if child.wait()]
    if failed:
        raise SystemExit(f"compilation failed: {failed}")


class Report:
    """Figures of one shape, as a table of batches."""

    def __init__(self, name: str, out: Path | None) -> None:
        self.name = name
        self._out = out
        print(f"\n{name:<34}" + "".join(f"{batch:>14}" for batch in BATCHES))

    def line(self, title: str, cells: dict[int, str]) -> None:
        print(f"{title:<34}" + "".join(f"{cells.get(batch, ''):>14}" for batch in BATCHES), flush=True)

    def note(self, **figures: object) -> None:
        if self._out is not None:
            with self._out.open("a") as file:
                file.write(json.dumps({"shape": self.name, **figures}) + "\n")


def measure_product(bench: Bench, report: Report, deadline: float) -> tuple[dict[int, Way | None], list[str]]:
    """Best way per batch (None: the library), and what was wrong."""
    product = bench.product
    library: dict[int, float] = {}
    ours: dict[int, float] = {}
    best: dict[int, Way | None] = {}
    wrong = []
    for tokens in BATCHES:
        library[tokens] = bench.time(tokens, None)
        tried: dict[Way, float] = {}
        for way in ways(product, tokens)[: None if time.monotonic() < deadline else 1]:
            error = bench.error(tokens, way)
            if error > WRONG:
                wrong.append(f"{report.name} {product.name} {tokens} {way}: relative error {error:.1e}")
                continue
            tried[way] = bench.time(tokens, way)
        if tried and product.normed:
            first = min(tried, key=tried.__getitem__)
            if isinstance(first, Vector):  # is it better to normalise once, before?
                outside = replace(first, norm=False)
                tried[outside] = bench.time(tokens, outside)
        for way, took in tried.items():
            report.note(product=product.name, tokens=tokens, way=str(way), us=took, library_us=library[tokens])
        best[tokens] = None
        if tried:
            first = min(tried, key=tried.__getitem__)
            ours[tokens] = tried[first]
            best[tokens] = first if tried[first] < library[tokens] else None
    for title, row in (("library", library), ("ours", ours)):
        cells = {tokens: f"{us:.1f} ({product.bytes / us / 1e6:.2f})" for tokens, us in row.items()}
        report.line(f"{product.name} {product.outputs} x {product.inputs} {title}", cells)
    return best, wrong


def measure_shape(name: str, out: Path | None, deadline: float) -> tuple[list[str], list[str]]:
    """Lines for the table of ways, and what was wrong."""
    shape = SHAPES[name]
    report = Report(name, out)
    lines, wrong = [], []
    benches: list[Bench] = []
    bests: dict[str, dict[int, Way | None]] = {}
    for product in products(shape):
        bench = Bench(product)
        bests[product.name], bad = measure_product(bench, report, deadline)
        wrong += bad
        lines.append(entry(name, product, bests[product.name]))
        if product.name != "lm_head":
            benches.append(bench)
    for title, fused in (("a layer but attention, library", False), ("a layer but attention, ours", True)):
        cells = {}
        for tokens in BATCHES:
            chosen = {product: best[tokens] for product, best in bests.items()} if fused else None
            cells[tokens] = f"{timed(layer_calls(shape, benches, tokens, chosen), least=8):.1f}"
        report.line(title, cells)
    benches.clear()
    for kernel in small_kernels(shape, 1):
        rows: tuple[dict[int, str], dict[int, str]] = ({}, {})
        for tokens in BATCHES:
            for row, calls in zip(rows, small_kernels(shape, tokens)[kernel], strict=True):
                row[tokens] = f"{timed(calls):.1f}"
        report.line(f"{kernel}, separate", rows[0])
        report.line(f"{kernel}, ours", rows[1])
    weight = draw(shape.hidden, shape.hidden)
    for title, place in (("addmm, a copy first", False), ("addmm, in place", True)):
        cells = {}
        for tokens in BATCHES:
            x, residual = draw(tokens, shape.hidden), draw(tokens, shape.hidden)
            add = residual.addmm_ if place else partial(torch.addmm, residual)
            cells[tokens] = f"{timed([lambda add=add, x=x: add(x, weight.t())]):.1f}"  # type: ignore[misc]
        report.line(title, cells)
    return lines, wrong


def entry(shape: str, product: Product, best: dict[int, Way | None]) -> str:
    """A line of `MEASURED`: batches with equal ways as one, and nothing behind the last way of ours."""
    steps: list[tuple[int, Way | None]] = []
    for tokens, way in best.items():
        if steps and steps[-1][1] == way:
            steps.pop()
        steps.append((tokens, way))
    while steps and steps[-1][1] is None:
        steps.pop()
    listed = ", ".join(f"({tokens}, {short(way)})" for tokens, way in steps) + ("," if len(steps) == 1 else "")
    return f"    ({product.outputs}, {product.inputs}): ({listed}),  # {shape} {product.name}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--early", action="store_true")
    parser.add_argument("--seconds", type=float, default=80, help="from then on only the first way is tried")
    parser.add_argument("--out", type=Path, help="file for one JSON line per way")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    args = parser.parse_args()
    begin = time.monotonic()
    gpu.EARLY = args.early
    shapes = args.shapes.split(",")
    torch.manual_seed(0)
    if args.compile:
        part, parts = map(int, args.compile.split("/"))
        return compile_part(shapes, part, parts)
    compile_all(shapes, args.early)
    print(f"compiled in {time.monotonic() - begin:.0f} s; microseconds (TB/s), early starts {args.early}")
    found = [measure_shape(name, args.out, begin + args.seconds) for name in shapes]
    print("\n".join(["", "MEASURED", *(line for lines, _ in found for line in lines)]))
    wrong = [line for _, bad in found for line in bad]
    print("\n".join(["", "WRONG", *wrong] if wrong else ["", f"all ways agree; {time.monotonic() - begin:.0f} s"]))
    return None


if __name__ == "__main__":
    main()
