"""This module owns the running of one workload on one variant, and the figures of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from radixlm.base.errors import Internal
from radixlm.bench.offline import empty_cache
from radixlm.bench.programs.record import Record, Recorder
from radixlm.bench.programs.table import Variant
from radixlm.bench.programs.workload import Workload
from radixlm.lang.backends.engine import EngineTransport
from radixlm.lang.backends.native import Native
from radixlm.lang.program import Function

if TYPE_CHECKING:
    from radixlm.llm import Engine

#: Greedy and of fixed length: every variant has the same work, and texts can be compared.
SAMPLING: Mapping[str, Any] = {"temperature": 0.0, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Result:
    """
    Attributes:
        seconds: wall time of all programs.
        latency: mean seconds of one program, from its start to its last text.
        optimal: hit rate that the offline optimum has on the same calls.
        texts: of each program, to compare with another variant's.
    """

    workload: str
    variant: str
    programs: int
    calls: int
    seconds: float
    latency: float
    prompt_tokens: int
    computed_tokens: int
    output_tokens: int
    hit_rate: float
    optimal: float
    texts: tuple[str, ...]

    @property
    def rate(self) -> float:
        """Programs a second."""
        return self.programs / self.seconds

    @property
    def fraction(self) -> float:
        """Of the optimal hit rate."""
        return self.hit_rate / self.optimal if self.optimal > 0 else 1.0

    def figures(self) -> dict[str, Any]:
        names = [name for name in self.__slots__ if name != "texts"]
        return {**{name: getattr(self, name) for name in names}, "rate": self.rate, "fraction": self.fraction}


def measure(engine: Engine, workload: Workload, name: str, variant: Variant) -> Result:
    """Run every item at once, from an empty cache.

    Raises:
        Internal: a program failed; a figure of the others would mean nothing.
    """
    recorder = Recorder(EngineTransport(engine))
    backend = Native(recorder, variant.scheduling)
    empty_cache(engine)
    clock = _Clock()
    started = time.perf_counter()
    states = list(
        clock.timed(workload.program).run_batch(
            workload.items, backend=backend, num_threads=len(workload.items), **SAMPLING
        )
    )
    seconds = time.perf_counter() - started
    for state in states:
        if (error := state.error()) is not None:
            raise Internal(f"a program of {workload.name} failed on {name}: {error.message}")
    record: Record = recorder.record
    return Result(
        workload=workload.name,
        variant=name,
        programs=len(states),
        calls=sum(1 for call in record.calls if not call.hint),
        seconds=seconds,
        latency=sum(clock.seconds) / len(clock.seconds),
        prompt_tokens=record.asked,
        computed_tokens=record.computed,
        output_tokens=record.generated,
        hit_rate=record.hit_rate,
        optimal=record.optimum(),
        texts=tuple(state.text() for state in states),
    )


class _Clock:
    """How long each program took."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._lock = threading.Lock()

    def timed(self, program: Function) -> Function:
        inner = program.func

        def timed(s: Any, **arguments: Any) -> Any:
            started = time.perf_counter()
            value = inner(s, **arguments)
            s.sync()
            with self._lock:
                self.seconds.append(time.perf_counter() - started)
            return value

        timed.__signature__ = program.signature  # type: ignore[attr-defined]
        return Function(timed, program.num_api_spec_tokens, program.bound)
