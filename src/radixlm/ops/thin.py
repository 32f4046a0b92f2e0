"""This module owns the choice of how a product of few tokens is computed on a GPU."""
from dataclasses import dataclass
@dataclass(frozen=True, slots=True)
class Vector:
    tokens: int; rows: int; columns: int; warps: int = 4; unroll: int = 2; stages: int = 1
@dataclass(frozen=True, slots=True)
class Tiles:
    tokens: int; rows: int; columns: int; split: int = 1; warps: int = 4; stages: int = 4
