"""This module owns the configuration file: YAML whose keys are the long flag names, with dashes or underscores."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from radixlm.base.errors import StartupError
from radixlm.config import options
from radixlm.config.resolve import Given


def read(path: str | Path) -> Mapping[str, Given]:
    """Read a file into a layer of values.

    Raises:
        StartupError: the file cannot be read, is not a YAML mapping, or a key or value in it is wrong.
    """
    import yaml

    name = Path(path).name
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
        content = yaml.safe_load(text)
    except OSError as error:
        raise StartupError(f"cannot read the configuration file {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise StartupError(f"the configuration file {path} is not UTF-8 text") from error
    except yaml.YAMLError as error:
        raise StartupError(f"the configuration file {path} is not valid YAML: {_one_line(error)}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise StartupError(f"the configuration file {path} holds no `name: value` lines")
    layer: dict[str, Given] = {}
    for key, value in content.items():
        where = f"{key} in {name}"
        option, off = options.find(str(key), where)
        checked = option.check(value, where)
        if option.name in layer:
            raise StartupError(f"{name} gives {option.key} twice: as {layer[option.name].key} and as {key}")
        layer[option.name] = Given(not checked if off else checked, f"file {name}", str(key))
    return layer


def _one_line(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or " ".join(str(error).split())
    return f"line {mark.line + 1}: {problem}" if mark is not None else str(problem)
