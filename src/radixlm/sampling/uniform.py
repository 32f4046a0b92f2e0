"""This module owns randomness: one number for each (seed, position), which depends on nothing else."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1) with 53 random bits, one for each pair.

    Two rounds of the SplitMix64 finaliser (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
    2014): the first spreads the seed, so that neighbouring seeds have nothing in common, the second the position in the
    seed's own sequence. A counter, not a state: a sequence that was paused, or computed in another batch, goes on with
    the same numbers.
    """
    with np.errstate(over="ignore"):
        streams = _mix(seeds.view(np.uint64) + _GOLDEN)
        words = _mix(streams + positions.view(np.uint64) * _GOLDEN)
    numbers: npt.NDArray[np.float64] = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
