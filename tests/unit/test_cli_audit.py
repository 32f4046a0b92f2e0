"""`radixlm audit-config`: each unsafe set-up is named, the default one is not."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import pytest

from radixlm.cli.main import main
from radixlm.config import env
from radixlm.config.options import OPTIONS

STRONG = secrets.token_urlsafe(32)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*(option.env for option in OPTIONS), env.CACHE, env.CONFIG):
        monkeypatch.delenv(name, raising=False)


def unsafe(capsys: pytest.CaptureFixture[str], *argv: str) -> set[str]:
    """The options that are named as unsafe; the exit code must agree."""
    status = main(["audit-config", *argv])
    said = capsys.readouterr().out
    assert STRONG not in said
    names = {line.split()[1].rstrip(":") for line in said.splitlines() if line.startswith("unsafe")}
    assert status == (2 if names else 0)
    return names


def test_the_default_is_safe(capsys: pytest.CaptureFixture[str]) -> None:
    assert unsafe(capsys) == set()


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--host", "0.0.0.0"], {"host"}),
        (["--host", "::"], {"host"}),
        (["--host", "example.internal"], {"host"}),
        (["--host", "127.0.0.1"], set()),
        (["--host", "::1"], set()),
        (["--allowed-origins", "*"], {"allowed-origins"}),
        (["--allowed-origins", "https://a.example"], set()),
        (["--api-key", "abc"], {"api-key"}),
        (["--max-body-bytes", str(1 << 30)], {"max-body-bytes"}),
        (["--grammar-timeout", "600", "--template-timeout", "600"], {"grammar-timeout", "template-timeout"}),
    ],
)
def test_what_is_unsafe(arguments: list[str], names: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert unsafe(capsys, *arguments) == names


@pytest.mark.parametrize(
    ("variables", "names"),
    [
        ({"HOST": "0.0.0.0", "API_KEY": STRONG}, set()),
        ({"HOST": "0.0.0.0", "API_KEY": "a" * 40}, {"api-key"}),
        ({"HOST": "0.0.0.0", "ADMIN_API_KEY": STRONG}, {"host", "admin-api-key"}),
        ({"ALLOWED_ORIGINS": "*", "API_KEY": STRONG}, set()),
    ],
)
def test_keys_of_the_environment(
    variables: dict[str, str], names: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"RADIXLM_{name}", value)
    assert unsafe(capsys) == names


def test_a_key_on_the_command_line_is_seen_by_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert unsafe(capsys, "--api-key", STRONG) == {"api-key"}


@pytest.mark.parametrize(("mode", "names"), [(0o600, set()), (0o640, {"api-key-file"}), (0o604, {"api-key-file"})])
def test_who_can_read_the_keys(mode: int, names: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(f"- {{name: a, key: {STRONG}}}")
    file.chmod(mode)
    assert unsafe(capsys, "--host", "0.0.0.0", "--api-key-file", str(file)) == names


def test_a_file_of_keys_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert unsafe(capsys, "--api-key-file", str(tmp_path / "none")) == {"api-key-file"}


@pytest.mark.parametrize(("mode", "names"), [(0o600, set()), (0o644, {"config"}), (0o622, {"config"})])
def test_who_can_read_and_change_the_configuration(
    mode: int, names: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "radixlm.yaml"
    file.write_text(f"api_key: {STRONG}\n")
    file.chmod(mode)
    assert unsafe(capsys, "--config", str(file)) == names


def test_who_can_change_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for mode, names in ((0o755, set[str]()), (0o777, {"model"})):
        os.chmod(tmp_path, mode)
        assert unsafe(capsys, str(tmp_path)) == names


def test_notes_do_not_fail_it(capsys: pytest.CaptureFixture[str]) -> None:
    arguments: list[Any] = ["org/model", "--watchdog-timeout", "0", "--log-level", "debug"]
    assert main(["audit-config", *arguments]) == 0
    said = capsys.readouterr().out
    for name in ("revision", "watchdog-timeout", "queue-timeout", "log-level"):
        assert f"note    {name}:" in said
