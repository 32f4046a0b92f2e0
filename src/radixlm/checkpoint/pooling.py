"""This module owns what a model directory says of pooling: the files that sentence-transformers writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from radixlm.base.request import PoolingKind
from radixlm.checkpoint.checkpoint import Checkpoint

#: Flag in the pooling module's config -> what we call it.
_FLAGS: dict[str, PoolingKind] = {
    "pooling_mode_cls_token": "first",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_NAMES: dict[str, PoolingKind] = {"cls": "first", "mean": "mean", "lasttoken": "last"}


def pooling(checkpoint: Checkpoint) -> PoolingKind:
    """How the model's hidden states are made one vector: what its files say, else the mean for an encoder and the last
    state for a decoder. Files that cannot be read say nothing.
    """
    for module in _read(checkpoint.directory / "modules.json") or []:
        if isinstance(module, dict) and str(module.get("type", "")).endswith("Pooling"):
            said = _read(checkpoint.directory / Path(str(module.get("path", ""))).name / "config.json")
            if isinstance(said, dict):
                named = _NAMES.get(str(said.get("pooling_mode", "")))
                found = [kind for flag, kind in _FLAGS.items() if said.get(flag) is True]
                if named or found:
                    return named or found[0]
    named_classes = checkpoint.config.get("architectures")
    decoder = isinstance(named_classes, list) and bool(named_classes) and "CausalLM" in str(named_classes[0])
    return "last" if decoder else "mean"


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
