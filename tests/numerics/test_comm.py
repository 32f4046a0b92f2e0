"""Collectives over gloo: what they compute, and that nobody waits for ever. The ranks are threads here."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from radixlm.parallel import torch_dist
from radixlm.parallel.base import Comm, Place
from radixlm.parallel.local import ALONE
from radixlm.parallel.select import connect

T = TypeVar("T")
CPU = torch.device("cpu")


def meet(size: int, path: Path, work: Callable[[Comm], T]) -> list[Future[T]]:
    """What became of `work` on every rank."""
    with ThreadPoolExecutor(size) as pool:
        return [
            pool.submit(lambda rank: work(connect(Place(rank, size, path / "meeting"), CPU)), rank)
            for rank in range(size)
        ]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_collectives_compute(size: int, dtype: torch.dtype, tmp_path: Path) -> None:
    parts = [torch.randn(5, 4, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(size)]

    def work(comm: Comm) -> tuple[torch.Tensor, ...]:
        mine = parts[comm.rank].clone()
        with torch.inference_mode():
            total = comm.all_reduce_(mine)
            assert total is mine
            return total, comm.all_gather(parts[comm.rank]), comm.all_gather(parts[comm.rank][:1])

    results = [future.result() for future in meet(size, tmp_path, work)]
    for total, rows, row in results:
        assert torch.equal(total, results[0][0]), "every rank has the same bits"
        torch.testing.assert_close(total.float(), sum(part.float() for part in parts), atol=0.05, rtol=0.01)
        assert torch.equal(rows, torch.cat(parts, dim=1))
        assert torch.equal(row, torch.cat([part[:1] for part in parts], dim=1))


def test_the_smallest_value(tmp_path: Path) -> None:
    found = meet(3, tmp_path, lambda comm: (comm.minimum(10 - comm.rank), comm.minimum(2**60 + comm.rank)))
    assert [future.result() for future in found] == [(8, 2**60)] * 3
    assert ALONE.minimum(3) == 3


def test_a_rank_that_does_not_come_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_dist, "STEP_SECONDS", 0.5)

    def work(comm: Comm) -> float:
        comm.all_reduce_(torch.ones(3))
        started = time.monotonic()
        if comm.rank == 0:
            with pytest.raises(RuntimeError):
                comm.all_reduce_(torch.ones(3))
        else:
            time.sleep(1.5)
        return time.monotonic() - started

    waited, _ = (future.result() for future in meet(2, tmp_path, work))
    assert 0.4 < waited < 1.4


def test_two_engines_in_one_process_do_not_meet(tmp_path: Path) -> None:
    """There is no group that belongs to the process."""

    def work(comm: Comm) -> float:
        return float(comm.all_reduce_(torch.ones(1)))

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(meet, 2, tmp_path / name, work) for name in "ab"]
    assert [future.result() for made in both for future in made.result()] == [2.0] * 4
    assert not torch.distributed.is_initialized()
