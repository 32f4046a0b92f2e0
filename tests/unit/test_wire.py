"""Messages survive their bytes, links keep order, and nothing malformed gets through."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from radixlm.base.facts import DeviceFacts, EngineFacts, ModelFacts, PoolFacts
from radixlm.base.request import LogprobParams, Request, TextParams
from radixlm.base.sampling import SamplingParams
from radixlm.wire import messages as m
from radixlm.wire.codec import MAX_MESSAGE_BYTES, Decoder, Malformed, encode
from radixlm.wire.link import LocalLink, ZmqInbox, ZmqOutbox

STATS = m.Stats(3, 4, 2, 0, 1.0, 2.0, 3.0, 4.0)
SCORES = m.Scores([1, 2], [None, -0.5], [[], [(3, -1.0), (4, -2.0)]], [[], [-3.0]])
FACTS = EngineFacts(
    model=ModelFacts(
        name="m", path="/m", architecture="LlamaForCausalLM", dtype="float32", parameters=1, layers=1, hidden_size=8,
        vocab_size=10, sampled_vocab_size=9, eos_ids=(1, 2), bos_id=None, context_length=32, kv_bytes_per_token=64,
        weight_bytes=4,
    ),
    device=DeviceFacts(kind="cpu", name="c", memory_total=2, memory_free=1, cores=2, features=("avx2",)),
    pool=PoolFacts(pages=4, page_size=16, max_running=2, bytes=4096),
    decisions={"dtype": ("float32", "asked for")},
    timings={"load": 0.5},
)  # fmt: skip
REQUEST = Request(
    uid=1, rid="a", tokens=(1, 2, 3), namespace="salt", priority=-1, arrival=1.5, deadline=2.5,
    sampling=SamplingParams(seed=-(2**63), logit_bias=((3, 1.5),), stop_token_ids=(4,), top_k=5),
    text=TextParams(stop=("x",), stop_regex=("y+",), stream=True),
    logprobs=LogprobParams(top=2, prompt_from=0, token_ids=(7,)),
)  # fmt: skip

EXAMPLES: dict[Any, list[Any]] = {
    m.ToEngine: [
        m.Submit(REQUEST), m.Cancel((1, 2), "gone"), m.Query(3, "stats"), m.EndSession("s"), m.Drain(1.5),
        m.Stop(2**62),
    ],
    m.ToDetokenizer: [
        m.Begin(1, 3, REQUEST.text),
        m.Tokens(b"\1" * 8, b"\2" * 4, [m.Extra(1, SCORES, SCORES, m.Finish("stop", "x"), STATS), m.Extra(2)]),
        m.Failed(1, m.Fault(400, "code", "why"), STATS),
        m.Goodbye(),
    ],
    m.ToApi: [
        m.Texts([m.TextDelta(1, "é", [1], 1, SCORES, SCORES, m.Finish("length"), STATS)]),
        m.Texts([m.TextDelta(2, fault=m.Fault(500, "c", "w"))]),
        m.Boot("engine", "weights", 0.5),
        m.Ready("engine", FACTS),
        m.Reply(3, {"running": 1, "nested": {"a": [1.5, None, "x"]}}),
        m.Reply(4, {}, m.Fault(400, "busy", "why")),
    ],
}  # fmt: skip


def test_every_message_has_an_example() -> None:
    for union, examples in EXAMPLES.items():
        assert {type(example) for example in examples} == set(get_args(union))


@pytest.mark.parametrize(("union", "message"), [(u, e) for u, examples in EXAMPLES.items() for e in examples])
def test_round_trip(union: Any, message: Any) -> None:
    assert Decoder(union).decode(encode(message)) == message


def test_a_message_of_another_union_is_refused() -> None:
    with pytest.raises(Malformed):
        Decoder(m.ToApi).decode(encode(m.Submit(REQUEST)))


@given(st.binary(max_size=200))
def test_noise_is_refused(data: bytes) -> None:
    for union in EXAMPLES:
        try:
            message = Decoder(union).decode(bytes((m.VERSION,)) + data)
        except Malformed:
            continue
        assert isinstance(message, get_args(union))


@given(st.data())
def test_damaged_messages_never_crash_the_reader(data: st.DataObject) -> None:
    good = bytearray(encode(EXAMPLES[m.ToDetokenizer][1]))
    at = data.draw(st.integers(0, len(good) - 1))
    good[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(good)))
    with contextlib.suppress(Malformed):
        assert isinstance(Decoder(m.ToDetokenizer).decode(bytes(good[:cut])), get_args(m.ToDetokenizer))


def test_wrong_version_and_size_are_named() -> None:
    decoder = Decoder[Any](m.ToEngine)
    with pytest.raises(Malformed, match="version"):
        decoder.decode(b"\xff" + encode(m.Stop(1))[1:])
    with pytest.raises(Malformed, match="limit"):
        decoder.decode(bytes(MAX_MESSAGE_BYTES + 1))


def test_local_link_keeps_order_and_blocks() -> None:
    link: LocalLink[int] = LocalLink()
    assert link.receive(0) == []
    threading.Timer(0.05, lambda: [link.send(i) for i in range(3)]).start()
    got: list[int] = []
    while len(got) < 3:
        got += link.receive(None)
    assert got == [0, 1, 2]
    assert link.receive(0.01) == []


def test_sockets_keep_order_and_drop_what_is_malformed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    address = f"ipc://{tmp_path}/in"
    outbox: ZmqOutbox[m.ToEngine] = ZmqOutbox(context, address)
    outbox.send(m.Stop(0))  # before anybody listens: it waits
    inbox: ZmqInbox[m.ToEngine] = ZmqInbox(context, address, m.ToEngine)
    raw = context.socket(zmq.PUSH)
    raw.connect(address)
    raw.send(b"not a message")
    for uid in range(1, 100):
        outbox.send(m.Stop(uid))
    got: list[m.ToEngine] = []
    end = time.monotonic() + 5
    while len(got) < 100 and time.monotonic() < end:
        got += inbox.receive(0.2)
    assert got == [m.Stop(uid) for uid in range(100)]
    inbox.receive(0.05)
    assert "malformed" in caplog.text
    for socket in (inbox, outbox, raw):
        socket.close()
    context.term()


def test_no_message_can_carry_code() -> None:
    """Everything on the ring decodes to structs, numbers, strings, lists and dicts."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"type": "submit"}), type=m.Submit)
