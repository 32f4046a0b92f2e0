"""This module owns the file of `--api-key-file`: keys with names, scopes and weights, in YAML.

- name: search              # what shares are counted by and logs may say; unique
  key: sk-...               # or sha256: the digest of the key in hex, so that the file holds no secret
  scopes: [infer]           # of infer, admin, metrics; infer if left out
  weight: 3                 # its part of the engine beside the others'; 1 if left out
  private_cache: true       # shares cached prefixes with no other key; false if left out
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import yaml

from radixlm.api.auth import Key, digest_of
from radixlm.base.errors import StartupError

#: Longest file in bytes, and weights that make sense.
LONGEST_FILE = 1 << 20
SMALLEST_WEIGHT, LARGEST_WEIGHT = 0.001, 1000.0

_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_KEY = re.compile(r"[!-~]+")


class _Entry(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    key: str = ""
    sha256: str = ""
    scopes: tuple[Literal["infer", "admin", "metrics"], ...] = ("infer",)
    weight: Annotated[float, msgspec.Meta(ge=SMALLEST_WEIGHT, le=LARGEST_WEIGHT)] = 1.0
    private_cache: bool = False


def read_keys(path: str) -> list[Key]:
    """The keys of a file.

    Raises:
        StartupError: it cannot be read, or an entry is wrong. No message repeats a key.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(LONGEST_FILE + 1)
    except OSError as error:
        raise _wrong(path, f"cannot be read: {(error.strerror or str(error)).lower()}") from None
    if len(data) > LONGEST_FILE:
        raise _wrong(path, f"is larger than {LONGEST_FILE} bytes")
    try:
        content = yaml.safe_load(data)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError):
        raise _wrong(path, "is not YAML") from None  # the parser's own words would quote the line
    if not isinstance(content, list) or not content:
        raise _wrong(path, "must hold a list of keys")
    keys = [_key(path, number, entry) for number, entry in enumerate(content, 1)]
    for what, values in (("name", [key.name for key in keys]), ("key", [key.digest for key in keys])):
        if len(set(values)) < len(values):
            number = next(i for i, value in enumerate(values) if value in values[:i]) + 1
            raise _wrong(path, f"entry {number} has the {what} of an earlier one")
    return keys


def _key(path: str, number: int, content: object) -> Key:
    try:
        entry = msgspec.convert(content, _Entry)
    except msgspec.ValidationError as error:
        raise _wrong(path, f"entry {number}: {error}") from None
    if bool(entry.key) == bool(entry.sha256):
        raise _wrong(path, f"entry {number} ({entry.name}) must have either key or sha256")
    if entry.key and not _KEY.fullmatch(entry.key):
        raise _wrong(path, f"entry {number} ({entry.name}): a key may hold printable ASCII without spaces only")
    if entry.sha256 and not _DIGEST.fullmatch(entry.sha256):
        raise _wrong(path, f"entry {number} ({entry.name}): sha256 must be 64 hexadecimal digits")
    if not entry.scopes:
        raise _wrong(path, f"entry {number} ({entry.name}) has no scope; choose of infer, admin, metrics")
    digest = digest_of(entry.key) if entry.key else bytes.fromhex(entry.sha256)
    return Key(entry.name, digest, frozenset(entry.scopes), entry.weight, entry.private_cache)


def _wrong(path: str, what: str) -> StartupError:
    return StartupError(f"the file of --api-key-file, {path}, {what}", param="api_key_file")
