"""This module owns the environment: the only reader of `os.environ`.

Options have twins (`RADIXLM_<FLAG>`); a cache directory, a configuration file and colours are the rest. Variables of
other libraries (`HF_TOKEN`, `HF_HOME`, `CUDA_VISIBLE_DEVICES`, `OMP_NUM_THREADS`) are read by those libraries.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from radixlm.config.options import OPTIONS, nearest

PREFIX: Final = "RADIXLM_"
#: Variables that are not twins of an option.
CACHE: Final = "RADIXLM_CACHE"
CONFIG: Final = "RADIXLM_CONFIG"

#: What a report on the environment shows beside our own variables. None of these is a secret.
_REPORTED: Final = (
    "CUDA_VISIBLE_DEVICES",
    "FORCE_COLOR",
    "HF_ENDPOINT",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "KMP_AFFINITY",
    "LD_PRELOAD",
    "MKL_NUM_THREADS",
    "NO_COLOR",
    "OMP_NUM_THREADS",
    "XDG_CACHE_HOME",
)


def twins() -> dict[str, str]:
    """Option name -> text of its twin, for those set. An empty variable counts as not set."""
    return {option.name: text for option in OPTIONS if (text := os.environ.get(option.env, ""))}


def strays() -> list[str]:
    """One warning for each `RADIXLM_` variable that names nothing, with the nearest that does.

    Orchestrators make such variables for a service called radixlm (`RADIXLM_SERVICE_HOST`, `RADIXLM_PORT_30000_TCP`);
    those are passed over.
    """
    known = [option.env for option in OPTIONS] + [CACHE, CONFIG]
    warnings = []
    for name in sorted(os.environ):
        made_for_service = name.startswith((f"{PREFIX}SERVICE_", f"{PREFIX}PORT_"))
        if name.startswith(PREFIX) and name not in known and not made_for_service:
            hint = nearest(name, known)
            warnings.append(f"{name} names no option" + (f"; did you mean {hint}?" if hint else ""))
    return warnings


def config_file() -> str | None:
    """Path of the YAML file to use when `--config` is not given."""
    return os.environ.get(CONFIG) or None


def cache_dir() -> Path:
    """Where converted models and the like are kept. Not created here."""
    if ours := os.environ.get(CACHE):
        return Path(ours).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "radixlm"
    return Path.home() / ".cache" / "radixlm"


def no_color() -> bool:
    """Colours are not wanted (https://no-color.org, or a terminal that has none)."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


def report() -> Mapping[str, str]:
    """What is set and matters, secrets starred: for a bug report."""
    secrets = {option.env for option in OPTIONS if option.secret}
    names = [name for name in sorted(os.environ) if name.startswith(PREFIX) or name in _REPORTED]
    shown = {name: "***" if name in secrets else os.environ[name] for name in names}
    if "HF_TOKEN" in os.environ:
        shown["HF_TOKEN"] = "***"
    return shown


#: Turns that an OpenMP thread waits for the others before it sleeps. libgomp's own 300,000 are a millisecond: with any
#: other process on the cores the thread that all wait for is then kept off its core by those that wait. Measured with a
#: busy neighbour on two cores, a decode step took 280 ms, and 166 with this; alone it takes the same.
_SPINS: Final = "10000"


def calm_threads() -> None:
    """Make OpenMP threads give up their core sooner, unless the environment says how long. To be called before torch is
    imported, which reads it once.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
