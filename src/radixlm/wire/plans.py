"""This module owns the bytes in which rank 0 tells the other ranks what to do: the plan, the masks, the end.

A plan is its own message: msgpack of what is not the same object as in the plan before, arrays as type and bytes. So a
steady decode sends a step number and positions, and a reader hands out the same objects where the planner did, which is
how a runner knows that a batch goes on (see `base.plan`). What is sent and read are frames of one ordered link.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np

from radixlm.base import plan as plans
from radixlm.base.plan import Ints, Plan

_PLAN, _SAMPLE, _LEAVE = b"P", b"S", b"L"

#: The types of a plan's arrays, by numpy's names.
_DTYPES: Final = frozenset({"<i4", "<i8", "|b1", "<f4"})

_FIELDS: Final = tuple(field.name for field in dataclasses.fields(Plan))


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Choose the next tokens of the last plan, under these masks (see `runner.base.Masks`)."""

    masks: Mapping[int, Ints]


@dataclass(frozen=True, slots=True)
class Leave:
    """There will be no more plans."""


Order = Plan | Sample | Leave


class PlanWriter:
    """Makes the frames of one link, in order."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
        self._last: Plan | None = None

    def plan(self, plan: Plan) -> bytes:
        last = self._last
        news = {
            name: value
            for name in _FIELDS
            if (value := getattr(plan, name)) is not getattr(last, name, _FIELDS)  # a plan holds anything but that
        }
        self._last = plan
        return _PLAN + self._encoder.encode(news)

    def sample(self, masks: Mapping[int, Ints] | None) -> bytes:
        return _SAMPLE + (self._encoder.encode(dict(masks)) if masks else b"")

    def leave(self) -> bytes:
        return _LEAVE


class PlanReader:
    """Reads the frames of one link, in order."""

    def __init__(self) -> None:
        types = typing.get_type_hints(Plan, vars(plans))
        self._parts: msgspec.msgpack.Decoder[dict[str, msgspec.Raw]] = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
        self._fields = {name: msgspec.msgpack.Decoder(types[name], dec_hook=_decode_array) for name in _FIELDS}
        self._masks = msgspec.msgpack.Decoder(dict[int, Ints], dec_hook=_decode_array)
        self._last: Plan | None = None

    def read(self, frame: bytes) -> Order:
        """Raises `msgspec.MsgspecError` or `ValueError` for a frame that no writer made."""
        kind, body = frame[:1], memoryview(frame)[1:]
        if kind == _LEAVE:
            return Leave()
        if kind == _SAMPLE:
            return Sample(self._masks.decode(body) if body else {})
        if kind != _PLAN:
            raise ValueError(f"a frame of the unknown kind {kind!r}")
        news = {name: self._fields[name].decode(value) for name, value in self._parts.decode(body).items()}
        self._last = Plan(**news) if self._last is None else dataclasses.replace(self._last, **news)
        return self._last


def _encode_array(value: Any) -> tuple[str, bytes]:
    if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.str not in _DTYPES:
        raise TypeError(f"{value!r} has no place in a plan")
    return value.dtype.str, value.tobytes()


def _decode_array(kind: Any, value: Any) -> Any:
    dtype, data = value
    if dtype not in _DTYPES:
        raise ValueError(f"arrays of the type {dtype!r} have no place in a plan")
    return np.frombuffer(data, dtype).copy()
