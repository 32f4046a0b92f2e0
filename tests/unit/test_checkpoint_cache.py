"""The cache: made once, whole or not at all, by any number of processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from radixlm.base.errors import StartupError
from radixlm.checkpoint.cache import Cache


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if not path.name.endswith(".lock"))


def test_filled_once(tmp_path: Path) -> None:
    cache, calls = Cache(tmp_path / "deep" / "root"), []

    def fill(target: Path) -> None:
        calls.append(target)
        (target / "file").write_text("whole")

    first = cache.directory("thing", fill)
    assert first == cache.directory("thing", fill) == tmp_path / "deep" / "root" / "thing"
    assert len(calls) == 1 and (first / "file").read_text() == "whole" and names(cache.root) == ["thing"]


def test_a_failure_leaves_nothing_and_the_next_run_starts_anew(tmp_path: Path) -> None:
    def fails(target: Path) -> None:
        (target / "half").write_text("half")
        raise StartupError("no")

    cache = Cache(tmp_path)
    with pytest.raises(StartupError, match="no"):
        cache.directory("thing", fails)
    assert names(tmp_path) == []
    made = cache.directory("thing", lambda target: (target / "whole").touch())
    assert [path.name for path in made.iterdir()] == ["whole"]


def test_a_killed_run_is_cleaned_up_by_the_next(tmp_path: Path) -> None:
    code = """
import os, sys
from pathlib import Path
from radixlm.checkpoint.cache import Cache
def fill(target):
    (target / "half").write_text("half")
    os.kill(os.getpid(), 9)
Cache(Path(sys.argv[1])).directory("thing", fill)
"""
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -9
    assert [name for name in names(tmp_path) if name.endswith(".part")] and not (tmp_path / "thing").exists()
    neighbour = tmp_path / ".thing.other.12345678.part"  # of another name that begins alike
    neighbour.mkdir()
    Cache(tmp_path).directory("thing", lambda target: None)
    assert names(tmp_path) == [neighbour.name, "thing"]


def test_one_fills_and_the_others_wait(tmp_path: Path) -> None:
    filled, waited, found = [], [], []

    def fill(target: Path) -> None:
        filled.append(target)
        time.sleep(0.2)
        (target / "file").touch()

    def work() -> None:
        found.append(Cache(tmp_path).directory("thing", fill, lambda: waited.append(1)) / "file")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(filled) == 1 and len(waited) == 3 and all(path.is_file() for path in found)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartupError, match=r"cannot write .*RADIXLM_CACHE"):
        Cache(tmp_path / "file" / "root").directory("thing", lambda target: None)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_directory_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StartupError, match="Permission denied"):
        Cache(tmp_path).directory("thing", lambda target: None)
