#!/usr/bin/env python3
"""Every program on every variant, several times over: `python benchmarks/programs/all.py DIRECTORY [options of bench
programs]`. Each pass has another seed and leaves a JSON file and a plot.
"""

from __future__ import annotations

import sys
from pathlib import Path

from radixlm.bench.programs.main import main

PASSES = 3


def passes(directory: Path, options: list[str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for seed in range(PASSES):
        files = ["--save-result", str(directory / f"{seed}.json"), "--plot", str(directory / f"{seed}.png")]
        main(["--random-seed", str(seed), *files, *options])


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    passes(Path(sys.argv[1]), sys.argv[2:])
