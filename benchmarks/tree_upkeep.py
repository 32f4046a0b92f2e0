"""What the radix tree costs and what it saves: requests that share a long prefix, with the tree and without it.

    python benchmarks/tree_upkeep.py --requests 32 --shared 1024 --own 64 --new 32

Prints the wall time of each, their ratio, the cached tokens, and the share of the wall time spent in the cache's verbs.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

from radixlm import Engine
from radixlm.cache import manager

VERBS = ("match", "open", "grow", "publish", "close", "reclaim", "headroom")


class Timed:
    """Sums the time spent in the methods of a class."""

    def __init__(self, kind: Any) -> None:
        self.seconds = 0.0
        for name in VERBS:
            setattr(kind, name, self._timed(getattr(kind, name)))

    def _timed(self, method: Any) -> Any:
        def call(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return method(*arguments)
            finally:
                self.seconds += time.perf_counter() - started

        return call


def run(prompts: list[list[int]], new: int, **options: Any) -> tuple[float, int]:
    """Seconds and cached tokens of one load on a fresh engine."""
    params = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
    with Engine(log_level="warning", **options) as engine:
        engine.generate(input_ids=[[1, 2, 3]], sampling_params={"max_new_tokens": 2})
        started = time.perf_counter()
        answers = engine.generate(input_ids=prompts, sampling_params=params)
        return time.perf_counter() - started, sum(answer["meta_info"]["cached_tokens"] for answer in answers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("requests", 32), ("shared", 1024), ("own", 64), ("new", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--model", default="smollm2")
    said = parser.parse_args()
    rng = random.Random(1)
    prefix = [rng.randrange(1000, 40_000) for _ in range(said.shared)]
    prompts = [prefix + [rng.randrange(1000, 40_000) for _ in range(said.own)] for _ in range(said.requests)]
    timed = Timed(manager.RadixManager)
    with_tree, cached = run(prompts, said.new, model=said.model)
    upkeep = timed.seconds
    without, _ = run(prompts, said.new, model=said.model, disable_radix_cache=True)
    print(f"with the tree {with_tree:.2f} s, without {without:.2f} s: {with_tree / without:.2f} of the time")
    skipped = said.shared * (said.requests - 1)
    print(f"cached tokens {cached} of {sum(map(len, prompts))}; {skipped} are skipped if the prefix is computed once")
    print(f"tree upkeep {upkeep * 1e3:.1f} ms: {upkeep / with_tree:.2%} of the wall time")


if __name__ == "__main__":
    main()
