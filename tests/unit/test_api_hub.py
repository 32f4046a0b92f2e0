"""The hub and its streams: one table, one terminal message each, nothing left behind."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from radixlm.api.hub import Hub, Stage
from radixlm.api.reader import SocketReader, ThreadOutbox
from radixlm.api.start import start
from radixlm.api.stream import Abandoned, Stream
from radixlm.api.witness import RequestLog
from radixlm.base.errors import BadRequest, StartupError, TimedOut, Unavailable
from radixlm.base.request import Request, TextParams
from radixlm.base.sampling import SamplingParams
from radixlm.wire.link import ZmqInbox, ZmqOutbox
from radixlm.wire.messages import (
    Boot,
    Cancel,
    Drain,
    Fault,
    Finish,
    Query,
    Ready,
    Reply,
    Scores,
    Stats,
    Submit,
    TextDelta,
    Texts,
    ToApi,
    ToEngine,
)
from support.server import facts

LENGTH = Finish("length")


class Box:
    """An outbox that keeps what it is given."""

    def __init__(self) -> None:
        self.sent: list[ToEngine] = []

    def send(self, message: ToEngine) -> None:
        self.sent.append(message)

    def close(self) -> None:
        pass

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]


def ready_hub(**options: Any) -> tuple[Hub, Box]:
    box = Box()
    hub = Hub(box, **options)
    hub.receive([Ready("engine", facts()), Ready("detokenizer")])
    hub.open()
    return hub, box


def request(rid: str = "r", **fields: Any) -> Request:
    return Request(uid=0, rid=rid, tokens=(1, 2), sampling=SamplingParams(), **fields)


def texts(*deltas: TextDelta) -> list[ToApi]:
    return [Texts(list(deltas))]


def test_uids_rise_and_each_index_gets_its_own_news() -> None:
    async def go() -> None:
        hub, box = ready_hub()
        first = hub.submit([request(), request()])
        second = hub.submit([request()])
        uids = [message.request.uid for message in box.of(Submit)]
        assert uids == sorted(set(uids)) == [*first.uids, *second.uids]
        hub.receive(texts(TextDelta(uids[1], "b", [1], 1), TextDelta(uids[2], "c", [2], 1)))
        assert await first.wait()
        assert [(i, d.text) for i, d in first.take()] == [(1, "b")]
        assert [(i, d.text) for i, d in second.take()] == [(0, "c")]
        hub.receive(texts(*(TextDelta(uid, finish=LENGTH) for uid in uids)))
        assert len(await first.whole()) == 2
        assert first.done and hub.in_flight == 0

    asyncio.run(go())


def test_leaving_cancels_what_runs_and_keeps_count_of_it() -> None:
    async def go() -> None:
        hub, box = ready_hub()
        with hub.submit([request(), request()]) as stream:
            hub.receive(texts(TextDelta(stream.uids[0], finish=LENGTH)))
        assert [c.uids for c in box.of(Cancel)] == [(stream.uids[1],)]
        assert hub.in_flight == 1  # until the engine says so
        hub.receive(texts(TextDelta(stream.uids[1], "late", [1], 1)))
        hub.receive(texts(TextDelta(stream.uids[1], finish=Finish("abort"))))
        assert hub.in_flight == 0
        stream.close()
        assert len(box.of(Cancel)) == 1

    asyncio.run(go())


def test_abandoning_wakes_whoever_waits() -> None:
    async def go() -> None:
        hub, box = ready_hub()
        stream = hub.submit([request()])
        waiting = asyncio.create_task(stream.wait())
        whole = asyncio.create_task(hub.submit([request()]).whole())
        await asyncio.sleep(0)
        stream.abandon()
        with pytest.raises(Abandoned):
            await waiting
        with pytest.raises(Abandoned):
            await stream.wait()
        assert box.of(Cancel)[0].uids == stream.uids
        whole.cancel()

    asyncio.run(go())


def test_abort_by_name_reaches_the_group_and_its_members() -> None:
    async def go() -> None:
        hub, box = ready_hub()
        batch = hub.submit([request("job_0"), request("job_1")], group="job")
        other = hub.submit([request("other")])
        assert hub.abort("nobody", "x") == 0 and not box.of(Cancel)
        assert hub.abort("job_1", "x") == 1
        assert hub.abort("job", "x") == 2
        assert hub.abort_all("x") == 3
        assert [c.uids for c in box.of(Cancel)] == [batch.uids[1:], batch.uids, (*batch.uids, *other.uids)]
        assert hub.in_flight == 3

    asyncio.run(go())


def test_engine_death_ends_everything_once() -> None:
    async def go() -> None:
        hub, box = ready_hub()
        stream, gone = hub.submit([request(), request()]), hub.submit([request()])
        question = asyncio.create_task(hub.query("stats"))
        await asyncio.sleep(0)
        gone.close()
        hub.engine_died("it was killed")
        hub.engine_died("a second reason")
        deltas = await stream.whole(patient=True)
        assert [d.fault and d.fault.status for d in deltas] == [503, 503]
        assert "it was killed" in deltas[0].fault.message  # type: ignore[union-attr]
        with pytest.raises(Unavailable, match="it was killed"):
            await question
        with pytest.raises(Unavailable):
            hub.submit([request()])
        with pytest.raises(Unavailable):
            await hub.query("stats")
        assert hub.in_flight == 0 and hub.stage is Stage.DEAD
        hub.receive(texts(TextDelta(stream.uids[0], finish=LENGTH)))  # too late, and harmless
        before = len(box.sent)
        stream.close()
        assert len(box.sent) == before

    asyncio.run(go())


def test_questions_by_ticket() -> None:
    async def go() -> None:
        hub, box = ready_hub()
        first, second = asyncio.create_task(hub.query("stats")), asyncio.create_task(hub.query("flush"))
        await asyncio.sleep(0)
        one, two = (query.ticket for query in box.of(Query))
        hub.receive([Reply(two, {}, Fault(400, "busy", "requests run")), Reply(one, {"a": 1}), Reply(99, {})])
        assert await first == {"a": 1}
        with pytest.raises(BadRequest, match="requests run") as refused:
            await second
        assert refused.value.code == "busy"
        with pytest.raises(TimedOut):
            await hub.query("ping", timeout=0.01)
        hub.receive([Reply(box.of(Query)[-1].ticket, {})])  # nobody waits for it any more

    asyncio.run(go())


def test_start_waits_for_every_process_and_can_fail() -> None:
    async def go() -> None:
        hub = Hub(Box())
        with pytest.raises(Unavailable, match="starting"):
            hub.submit([request()])
        hub.receive([Boot("engine", "loading weights", 0.5)])
        assert [(p.role, p.fraction) for p in hub.progress] == [("engine", 0.5)]
        assert "loading weights 50%" in hub.refusal().message
        starting = asyncio.create_task(start(hub, warm_up=False))
        hub.receive([Ready("detokenizer")])
        await asyncio.sleep(0.01)
        assert not starting.done()
        hub.receive([Ready("engine", facts())])
        await starting
        assert hub.stage is Stage.READY and (await hub.until_ready()).model.name == "tiny"

        broken = Hub(Box())
        broken.receive([Boot("engine", "failed", error="no such file: model")])
        with pytest.raises(StartupError, match="no such file"):
            await start(broken, warm_up=True)
        with pytest.raises(StartupError, match="no such file"):
            await broken.until_ready()

    asyncio.run(go())


@pytest.mark.parametrize("works", [True, False])
def test_warm_up_goes_through_the_ring_before_clients_do(works: bool) -> None:
    async def go() -> None:
        box = Box()
        hub = Hub(box)
        starting = asyncio.create_task(start(hub, warm_up=True))
        hub.receive([Ready("engine", facts()), Ready("detokenizer")])
        for _ in range(5):
            await asyncio.sleep(0)
        assert hub.stage is Stage.WARMING
        (submit,) = box.of(Submit)
        fault = None if works else Fault(500, "model_error", "not a number")
        hub.receive(texts(TextDelta(submit.request.uid, finish=LENGTH if works else None, fault=fault)))
        if works:
            await starting
            assert hub.stage is Stage.READY
        else:
            with pytest.raises(StartupError, match="not a number"):
                await starting
            assert hub.stage is Stage.DEAD

    asyncio.run(go())


def test_drain_waits_for_the_last_one_and_takes_no_more() -> None:
    async def go() -> None:
        hub, box = ready_hub()
        stream = hub.submit([request()])
        draining = asyncio.create_task(hub.drain(5.0))
        await asyncio.sleep(0)
        assert box.of(Drain) == [Drain(5.0)]
        with pytest.raises(Unavailable, match="shutting down"):
            hub.submit([request()])
        assert not draining.done()
        hub.receive(texts(TextDelta(stream.uids[0], "end", [1], 1, finish=LENGTH)))
        await draining
        assert (await stream.whole())[0].text == "end"

    asyncio.run(go())


def test_drain_does_not_wait_for_an_engine_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixlm.api.hub.DRAIN_GRACE", 0.02)

    async def go() -> None:
        hub, _ = ready_hub()
        stream = hub.submit([request()])
        await hub.drain(0.01)
        (delta,) = await stream.whole()
        assert delta.fault is not None and delta.fault.status == 503
        assert hub.in_flight == 0

    asyncio.run(go())


def test_a_deadline_holds_even_if_the_engine_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixlm.api.hub.DEADLINE_GRACE", 0.02)

    async def go() -> None:
        hub, box = ready_hub()
        with hub.submit([request(deadline=time.time() + 0.01)]) as stream:
            assert not await stream.wait(0.001)  # silence is not the deadline
            with pytest.raises(TimedOut):
                await stream.whole()
        assert box.of(Cancel)[0].uids == stream.uids

    asyncio.run(go())


def test_one_failure_ends_an_impatient_wait() -> None:
    async def go() -> None:
        hub, _ = ready_hub()
        stream = hub.submit([request(), request()])
        hub.receive(texts(TextDelta(stream.uids[1], fault=Fault(429, "queue_full", "full"))))
        (delta,) = await stream.whole()
        assert delta.uid == stream.uids[1] and delta.fault is not None

    asyncio.run(go())


scores = st.one_of(
    st.none(),
    st.lists(st.integers(0, 9), max_size=3).map(
        lambda ids: Scores(ids, [-float(i) for i in ids], [[(i, -1.0)] for i in ids], [[-2.0] for _ in ids])
    ),
)
deltas = st.builds(
    TextDelta, st.just(1), st.text(max_size=3), st.lists(st.integers(0, 9), max_size=3), st.just(0), scores, scores
)


@settings(deadline=None)
@given(st.lists(deltas, max_size=12), st.lists(st.booleans(), min_size=12, max_size=12))
def test_merged_news_is_the_same_news(parts: list[TextDelta], reads: list[bool]) -> None:
    """However seldom the reader reads, what it gets joins to what was sent, and one entry waits at most."""
    stream = Stream((1,), lambda stream: None)
    taken: list[TextDelta] = []
    for part, read in zip(parts, reads, strict=False):
        stream.push(0, part, terminal=False)
        if read:
            taken += [delta for _, delta in stream.take()]
    stream.push(0, TextDelta(1, finish=LENGTH, stats=Stats(1, 2, 3, 4, 0, 0, 0, 0)), terminal=True)
    last = stream.take()
    assert len(last) == 1 and stream.done
    taken.append(last[0][1])
    assert taken[-1].finish == LENGTH and taken[-1].stats is not None
    assert "".join(d.text for d in taken) == "".join(d.text for d in parts)
    assert [i for d in taken for i in d.ids] == [i for d in parts for i in d.ids]
    for name in ("scores", "prompt_scores"):
        sent, got = ([getattr(d, name) for d in ds if getattr(d, name) is not None] for ds in (parts, taken))
        for field in ("ids", "chosen", "top", "picked"):
            assert [x for s in got for x in getattr(s, field)] == [x for s in sent for x in getattr(s, field)]


def test_messages_from_sockets_and_threads_reach_the_loop(tmp_path: Path) -> None:
    async def go() -> None:
        loop = asyncio.get_running_loop()
        got: list[ToApi] = []
        arrived = asyncio.Event()

        def receive(messages: Any) -> None:
            got.extend(messages)
            if len(got) == 300:
                arrived.set()

        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        inbox: ZmqInbox[ToApi] = ZmqInbox(context, f"ipc://{tmp_path}/api", ToApi)
        early: ZmqOutbox[ToApi] = ZmqOutbox(context, inbox.address)
        for i in range(100):
            early.send(Reply(i, {}))
        await asyncio.sleep(0.05)
        reader = SocketReader(inbox, receive)
        reader.start()
        for i in range(100, 200):
            early.send(Reply(i, {}))
            await asyncio.sleep(0)
        outbox = ThreadOutbox(loop, receive)
        thread = threading.Thread(target=lambda: [outbox.send(Reply(i, {})) for i in range(200, 300)])
        thread.start()
        await asyncio.wait_for(arrived.wait(), 5)
        thread.join()
        assert sorted(m.ticket for m in got if isinstance(m, Reply)) == list(range(300))
        reader.stop()
        early.send(Reply(300, {}))
        await asyncio.sleep(0.02)
        assert len(got) == 300
        early.close()
        inbox.close()
        context.destroy(linger=0)

    asyncio.run(go())


def test_the_request_log_has_counts_and_no_text(caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> None:
        hub, _ = ready_hub(witnesses=[RequestLog()])
        stream = hub.submit([request("my-rid", text=TextParams(stream=True), arrival=1.0)])
        uid = stream.uids[0]
        hub.receive(texts(TextDelta(uid, "secret", [1], 1)))
        hub.receive(texts(TextDelta(uid, "more", [1], 2, finish=LENGTH, stats=Stats(2, 2, 1, 0, 1, 2, 3, 4))))

    with caplog.at_level(logging.INFO, "radixlm.requests"):
        asyncio.run(go())
    (record,) = caplog.records
    fields = vars(record)
    assert (fields["rid"], fields["finish"], fields["prompt_tokens"]) == ("my-rid", "length", 2)
    assert (fields["cached_tokens"], fields["completion_tokens"]) == (1, 2)
    assert 0 < fields["ttft_seconds"] <= fields["e2e_seconds"]
    assert "secret" not in str(fields)


def test_a_group_of_which_one_cannot_be_sent_leaves_nothing_behind() -> None:
    async def go() -> None:
        hub, box = ready_hub()
        real, sent = box.send, []

        def send(message: ToEngine) -> None:
            if isinstance(message, Submit) and len(sent) == 2:
                raise OverflowError("can't serialize")
            sent.append(message)
            real(message)

        box.send = send  # type: ignore[method-assign]
        with pytest.raises(OverflowError):
            hub.submit([request(), request(), request()])
        (cancel,) = box.of(Cancel)
        assert cancel.uids == tuple(message.request.uid for message in box.of(Submit))
        hub.receive(texts(*(TextDelta(uid, finish=Finish("abort")) for uid in cancel.uids)))
        assert hub.in_flight == 0

    asyncio.run(go())
