"""This module owns the way from a whole ring to a server that is ready: a small request of its own proves the ring."""

from __future__ import annotations

import time

from radixlm.api.hub import Hub
from radixlm.base.errors import Internal, RadixError, StartupError, by_status
from radixlm.base.facts import EngineFacts
from radixlm.base.request import Request
from radixlm.base.sampling import SamplingParams


async def start(hub: Hub, warm_up: bool) -> None:
    """Take a hub from a whole ring to ready. With `warm_up` the server answers a small request of its own first.

    Raises:
        StartupError: the ring cannot start, or it cannot answer.
    """
    facts = await hub.until_whole()
    if warm_up:
        try:
            await probe(hub, facts)
        except RadixError as error:
            hub.engine_died(f"the first request failed: {error.message}")
            raise StartupError(f"the first request failed: {error.message}") from error
    hub.open()


async def probe(hub: Hub, facts: EngineFacts) -> None:
    """Generate one token through the whole ring, or make one vector. Raises what went wrong."""
    token = facts.model.bos_id if facts.model.bos_id is not None else 0
    request = Request(
        uid=0,
        rid="probe",
        tokens=(token,),
        sampling=SamplingParams(max_new_tokens=int(facts.model.generates), temperature=0.0, ignore_eos=True),
        arrival=time.time(),
        pooling=None if facts.model.generates else facts.model.pooling,
    )
    with hub.submit([request]) as stream:
        (delta,) = await stream.whole()
    if delta.fault is not None:
        raise by_status(delta.fault.status, delta.fault.message, delta.fault.code)
    if delta.finish is None or delta.finish.kind == "abort":
        raise Internal("a one-token request was aborted")
