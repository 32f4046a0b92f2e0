"""Where the sockets of a server lie."""

from __future__ import annotations

import stat
import tempfile
from pathlib import Path

import pytest

from radixlm.base.errors import StartupError
from radixlm.launch.topology import LONGEST_PATH, Topology


@pytest.mark.parametrize("length", [1, 200])
def test_a_private_directory_with_short_paths(length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / ("x" * length)
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    made = Topology.create()
    try:
        assert stat.S_IMODE(made.directory.stat().st_mode) == 0o700
        for address in (made.api, made.engine, made.detokenizer):
            assert len(address.removeprefix("ipc://").encode()) <= LONGEST_PATH
    finally:
        made.remove()
    assert not made.directory.exists() and not list(place.iterdir())


def test_no_place_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(StartupError, match="TMPDIR"):
        Topology.create()
