"""This module owns `Option`: one configurable field seen from outside, with its names, its parsing and its range."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from radixlm.base.errors import StartupError
from radixlm.config.schema import Config

#: Values of an option: what YAML and the command line can say.
Value = str | int | float | bool | None

_KINDS: Final = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
_BOOLS: Final = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


@dataclass(frozen=True, slots=True)
class Option:
    """A field of the configuration.

    Attributes:
        owner, name: where it lives: `config.<owner>.<name>`. Names are unique over all owners.
        kind: str, int, float or bool; `optional` when None is allowed too.
        names: further names, with dashes inside and none in front.
    """

    owner: str
    name: str
    kind: type
    optional: bool
    default: Value
    help: str
    names: tuple[str, ...]
    choices: tuple[str, ...]
    aliases: tuple[tuple[str, str], ...]
    low: float | None
    high: float | None
    secret: bool
    shown: str

    @property
    def key(self) -> str:
        """The canonical name: the flag without its two dashes, and the YAML key."""
        return self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return f"RADIXLM_{self.name.upper()}"

    @property
    def flags(self) -> tuple[str, ...]:
        """Every flag of the option, the canonical one first. One-letter names take one dash."""
        return tuple(f"-{name}" if len(name) == 1 else f"--{name}" for name in (self.key, *self.names))

    @property
    def off_keys(self) -> tuple[str, ...]:
        """Names that switch a boolean off: the opposites of its names."""
        return tuple(_opposite(name) for name in (self.key, *self.names)) if self.kind is bool else ()

    @property
    def default_text(self) -> str:
        """The default as help prints it."""
        return self.shown if self.default is None else self.show(self.default) or "empty"

    def show(self, value: Value) -> str:
        """A value as people read it. Secrets are starred."""
        if value is None:
            return "none"
        if self.secret:
            return "***"
        if isinstance(value, bool):
            return "on" if value else "off"
        return f"{value:g}" if isinstance(value, float) else str(value)

    def parse(self, text: str, where: str) -> Value:
        """A value given as text, on the command line or in the environment.

        Raises:
            StartupError: naming `where` it was given and what is allowed.
        """
        try:
            if self.kind is bool:
                return self.check(_BOOLS[text.strip().lower()], where)
            return self.check(text if self.kind is str else self.kind(text.strip()), where)
        except (ValueError, KeyError):
            raise self._wrong(text, where, f"must be {_KINDS[self.kind]}") from None

    def check(self, value: object, where: str) -> Value:
        """A typed value, from YAML or a Python argument: type, choice and range.

        Raises:
            StartupError: naming `where` it was given and what is allowed.
        """
        if value is None:
            if not self.optional:
                raise self._wrong(value, where, f"must be {_KINDS[self.kind]}")
            return None
        if self.kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if type(value) is not self.kind:
            raise self._wrong(value, where, f"must be {_KINDS[self.kind]}")
        if isinstance(value, float) and not math.isfinite(value):
            raise self._wrong(value, where, "must be finite")
        if isinstance(value, str):
            return self._check_text(value, where)
        assert isinstance(value, int | float)
        if not _within(value, self.low, self.high):
            raise self._wrong(value, where, f"must be {_range(self.low, self.high)}")
        return value

    def _check_text(self, value: str, where: str) -> str:
        value = dict(self.aliases).get(value, value)
        if self.choices and value not in self.choices:
            raise self._wrong(value, where, f"must be one of {', '.join(self.choices)}")
        if any(ord(character) < 32 or ord(character) == 127 for character in value):
            raise self._wrong(value, where, "must not hold control characters")
        if self.optional and not value:
            raise self._wrong(value, where, "must not be empty")
        return value

    def _wrong(self, value: object, where: str, must: str) -> StartupError:
        shown = "a value that is not shown" if self.secret else repr(value) if isinstance(value, str) else value
        return StartupError(f"{where} is {shown}; it {must}", param=self.name)


def _opposite(name: str) -> str:
    for prefix, other in (("disable-", "enable-"), ("enable-", "disable-"), ("no-", "")):
        if name.startswith(prefix):
            return other + name.removeprefix(prefix)
    return f"no-{name}"


def _within(value: float, low: float | None, high: float | None) -> bool:
    return (low is None or value >= low) and (high is None or value <= high)


def _range(low: float | None, high: float | None) -> str:
    return f"at least {low}" if high is None else f"between {low} and {high}"


def _walk() -> Iterable[Option]:
    for name, owner in OWNERS.items():
        hints = typing.get_type_hints(owner)
        for field in dataclasses.fields(owner):
            hint = hints[field.name]
            parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
            kind = next(part for part in parts if part is not types.NoneType)
            yield Option(
                owner=name,
                name=field.name,
                kind=kind,
                optional=types.NoneType in parts,
                default=None if field.default is dataclasses.MISSING else field.default,
                **field.metadata,
            )


#: Branch of the configuration -> its class.
OWNERS: Final[Mapping[str, type[Any]]] = types.MappingProxyType(typing.get_type_hints(Config))
#: Every option, in the order of the schema.
OPTIONS: Final[tuple[Option, ...]] = tuple(_walk())
BY_NAME: Final[Mapping[str, Option]] = types.MappingProxyType({option.name: option for option in OPTIONS})
_BY_KEY: Final = types.MappingProxyType({name: option for option in OPTIONS for name in (option.key, *option.names)})
_OFF_KEYS: Final = types.MappingProxyType({name: option for option in OPTIONS for name in option.off_keys})


def find(name: str, where: str) -> tuple[Option, bool]:
    """The option of any of its names, with dashes or underscores, and whether that name switches it off.

    Raises:
        StartupError: no such option; the nearest is named.
    """
    key = name.strip().replace("_", "-")
    if key in _BY_KEY:
        return _BY_KEY[key], False
    if key in _OFF_KEYS:
        return _OFF_KEYS[key], True
    hint = nearest(key, (*_BY_KEY, *_OFF_KEYS))
    raise StartupError(f"{where} is not a known option" + (f"; did you mean {hint}?" if hint else ""), param=name)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known name most like `word`, or None when nothing is. One-letter names are never suggested."""
    bare = {name.lstrip("-"): name for name in known if len(name.lstrip("-")) > 1}
    word = word.lstrip("-")
    close = difflib.get_close_matches(word, bare, n=1, cutoff=0.6)
    if close:
        return bare[close[0]]
    holding = [name for name in bare if len(word) > 2 and word in name]
    return bare[min(holding, key=len)] if holding else None
