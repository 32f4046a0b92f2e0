"""Triton kernels on a CPU: its interpreter has to be chosen before triton is first imported.

Where there is a GPU the same is tested on it, compiled (tests/gpu), and nothing may be interpreted in its place.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import pytest
import torch

ON_GPU = torch.cuda.is_available()
TOO_LATE = "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1"
if not ON_GPU and not TOO_LATE:
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    if ON_GPU:
        pytest.skip("there is a GPU: the kernels are tested on it")
    if TOO_LATE:
        pytest.skip("triton was imported before its interpreter could be chosen")
    interpreter = importlib.import_module("triton.runtime.interpreter")
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        """Bounds of loops are arrays of one element, which `int` takes no longer since NumPy 2.4."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
