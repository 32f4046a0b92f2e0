"""Rules about the source itself: one reader of the environment, no object deserialisation, no shared mutable state."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2] / "src" / "radixlm"
FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "multiprocessing"}
FORBIDDEN_CALLS = {"eval", "exec", "compile"}
MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(ROOT.rglob("*.py")):
        yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def test_only_one_module_reads_the_environment() -> None:
    readers = {
        name
        for name, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") and isinstance(node.value, ast.Name)
    }
    assert readers <= {"config/env.py"}


def test_nothing_deserialises_objects_or_runs_text() -> None:
    wrong = []
    for name, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                wrong += [f"{name}:{node.lineno}" for a in node.names if a.name.split(".")[0] in FORBIDDEN_MODULES]
            elif isinstance(node, ast.ImportFrom):
                wrong += [f"{name}:{node.lineno}"] * ((node.module or "").split(".")[0] in FORBIDDEN_MODULES)
            elif isinstance(node, ast.Call):
                f = node.func
                if isinstance(f, ast.Name) and f.id in FORBIDDEN_CALLS:
                    wrong.append(f"{name}:{node.lineno}")
                if isinstance(f, ast.Attribute) and f.attr in ("send_pyobj", "recv_pyobj"):
                    wrong.append(f"{name}:{node.lineno}")
                if isinstance(f, ast.Attribute) and f.attr == "load" and getattr(f.value, "id", "") == "torch":
                    wrong.append(f"{name}:{node.lineno}")
    assert not wrong, wrong


def test_modules_hold_no_mutable_state() -> None:
    """Module-level containers are constants: upper-case names or dunders, never assigned again by a `global`."""
    wrong = []
    for name, tree in trees():
        for node in tree.body:
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AnnAssign)
                else []
            )
            if targets and isinstance(getattr(node, "value", None), MUTABLE):
                for target in targets:
                    if (
                        isinstance(target, ast.Name)
                        and not target.id.strip("_").isupper()
                        and not target.id.startswith("__")
                    ):
                        wrong.append(f"{name}:{node.lineno} {target.id}")
        wrong += [f"{name}:{n.lineno} global" for n in ast.walk(tree) if isinstance(n, ast.Global)]
    assert not wrong, wrong


def test_files_say_what_they_own() -> None:
    assert not [name for name, tree in trees() if not ast.get_docstring(tree) and tree.body]


def test_files_and_functions_stay_readable() -> None:
    long_files = [n for n, t in trees() if t.body and max(getattr(b, "end_lineno", 0) for b in t.body) > 600]
    long_functions = [
        f"{name}:{node.lineno} {node.name} has {node.end_lineno - node.lineno} lines"
        for name, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno is not None
        if node.end_lineno - node.lineno > 80
    ]
    assert not long_files + long_functions, long_files + long_functions
