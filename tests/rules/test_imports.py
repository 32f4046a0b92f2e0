"""The layers of the house: a package imports only from lower layers, and some packages never see torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "radixlm"

LAYERS = {
    "base": 0, "config": 0, "observe": 0,
    "wire": 1, "device": 1, "checkpoint": 1,
    "cache": 2, "memory": 2, "ops": 2, "parallel": 2,
    "attention": 3, "layers": 3, "models": 3, "sampling": 3, "grammar": 3,
    "schedule": 4, "runner": 4,
    "engine": 5, "text": 5,
    "api": 6, "client": 6,
    "launch": 7, "llm": 7, "lang": 7, "bench": 7, "cli": 7, "__init__": 7, "__main__": 7,
}  # fmt: skip

#: Arrows that stay within a layer. Everything else points down.
WITHIN = {
    ("config", "base"), ("observe", "base"), ("observe", "config"),
    ("memory", "ops"),
    ("layers", "attention"), ("models", "layers"), ("models", "attention"),
    ("llm", "launch"), ("bench", "llm"), ("bench", "launch"), ("bench", "lang"), ("lang", "llm"),
    ("cli", "launch"), ("cli", "llm"), ("cli", "bench"),
    ("__main__", "cli"), ("__init__", "llm"), ("__init__", "lang"),
}  # fmt: skip

#: Who may not know whom, although the layers would allow it.
NEVER = {
    ("api", "schedule"), ("api", "runner"), ("api", "engine"),
    ("client", "schedule"), ("client", "runner"), ("client", "engine"),
    ("text", "schedule"), ("text", "runner"), ("text", "engine"),
    ("schedule", "runner"), ("runner", "schedule"),
}  # fmt: skip

NO_TORCH = {
    "base",
    "config",
    "observe",
    "wire",
    "checkpoint",
    "cache",
    "grammar",
    "schedule",
    "text",
    "api",
    "client",
    "launch",
    "lang",
    "cli",
}


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(ROOT.rglob("*.py")):
        yield path.relative_to(ROOT).parts[0].removesuffix(".py"), path


def imports(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            yield node.module or "", node.lineno


def test_every_package_has_a_layer() -> None:
    assert {package for package, _ in modules()} <= LAYERS.keys()


def test_imports_point_downward() -> None:
    wrong = []
    for package, path in modules():
        for name, line in imports(path):
            parts = name.split(".")
            if parts[0] != "radixlm" or len(parts) == 1:
                continue
            target = parts[1]
            if target == package:
                continue
            down = LAYERS[target] < LAYERS[package] or (package, target) in WITHIN
            if not down or (package, target) in NEVER:
                wrong.append(f"{path.relative_to(ROOT)}:{line} {package} -> {target}")
    assert not wrong, "\n".join(wrong)


def test_no_torch_where_none_is_needed() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for package, path in modules()
        if package in NO_TORCH
        for name, line in imports(path)
        if name.split(".")[0] in ("torch", "transformers")
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "module",
    ["radixlm", "radixlm.cli.main", "radixlm.api.app", "radixlm.text.worker", "radixlm.launch.main", "radixlm.lang"],
)
def test_light_modules_load_no_torch(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert loaded == "[]"
