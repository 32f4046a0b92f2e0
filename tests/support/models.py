"""Real models for tests, fetched and converted once on this machine."""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path

from radixlm.checkpoint.cache import Cache
from radixlm.checkpoint.checkpoint import Checkpoint
from radixlm.checkpoint.locate import locate


@cache
def packaged(name: str = "smollm2") -> Checkpoint:
    """A packaged model, by default the smallest. Its cache outlives the run, so only the first one converts."""
    root = Path(tempfile.gettempdir()) / f"radixlm-tests-{os.getuid()}"
    return locate(name, None, None, lambda stage, fraction: None, Cache(root))
