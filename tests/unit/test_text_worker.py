"""The detokenizer as the engine and the api see it: whole conversations with random steps, stops and ends."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import zmq

from radixlm.base.pieces import Piece, joined
from radixlm.base.request import Parsing, TextParams
from radixlm.text.detok import Decoding
from radixlm.text.worker import Detokenizer, run
from radixlm.wire.link import Callback, LocalLink, ZmqInbox, ZmqOutbox
from radixlm.wire.messages import (
    Begin,
    Extra,
    Failed,
    Fault,
    Finish,
    Goodbye,
    Scores,
    Stats,
    Stop,
    TextDelta,
    Texts,
    ToDetokenizer,
    Tokens,
)
from support import vocab

WORDS = vocab.byte_level()
STATS = Stats(5, 0, 3, 1, 100.0, 101.0, 102.0, 103.0)
LENGTH = Finish("length")
NOW = 200.0


def tokens(pairs: Iterable[tuple[int, int]], *extras: Extra) -> Tokens:
    uids, ids = zip(*pairs, strict=True) if pairs else ((), ())
    return Tokens(np.array(uids, "<i8").tobytes(), np.array(ids, "<i4").tobytes(), list(extras))


def scores(ids: Sequence[int]) -> Scores:
    """Scores that tell which token they belong to."""
    return Scores(list(ids), [-i / 7 for i in ids], [[(i, -i / 7)] for i in ids], [[-float(i)] for i in ids])


class Conversation:
    """A detokenizer and what it has said."""

    def __init__(self) -> None:
        self.detokenizer = Detokenizer(WORDS, clock=lambda: NOW)
        self.deltas: list[TextDelta] = []
        self.stops: list[int] = []

    def handle(self, *messages: ToDetokenizer) -> list[TextDelta]:
        texts, stops = self.detokenizer.handle(list(messages))
        fresh = texts.deltas if texts is not None else []
        self.deltas += fresh
        self.stops += [stop.uid for stop in stops]
        return fresh

    def of(self, uid: int) -> list[TextDelta]:
        return [delta for delta in self.deltas if delta.uid == uid]

    def text(self, uid: int) -> str:
        return "".join(delta.text for delta in self.of(uid))

    def ids(self, uid: int) -> list[int]:
        return [token for delta in self.of(uid) for token in delta.ids]


def say(ids: list[int], text: TextParams, finish: Finish = LENGTH) -> Conversation:
    """One sequence, a message a token, the last with its end. Stops as the engine would when it is told to."""
    talk = Conversation()
    talk.handle(Begin(1, 5, text))
    for index, token in enumerate(ids):
        last = index == len(ids) - 1
        stats = [Extra(1, stats=STATS)] if index == 0 else []
        talk.handle(tokens([(1, token)], *([Extra(1, finish=finish, stats=STATS)] if last else stats)))
    return talk


def stop_at(ids: list[int], text: TextParams) -> tuple[str, int, str | None]:
    """The text, the number of tokens and the stop that a search of the whole text finds."""
    detok = Decoding(WORDS).open(text.skip_special_tokens)
    settled = [""]  # by the first i tokens
    for token in ids:
        settled.append(settled[-1] + detok.push([token]))
    whole = settled[-1] + detok.finish()
    armed_from = len(settled[max(0, min(len(ids), text.min_new_tokens - 1))])
    if text.min_new_tokens > len(ids):
        armed_from = len(whole)
    for end in range(armed_from + 1, len(whole) + 1):
        found = [stop for stop in text.stop if stop and whole[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            count = next((i for i, part in enumerate(settled) if len(part) >= end), len(ids))
            return whole[:end] if text.keep_stop else whole[: end - len(stop)], count, stop
    return whole, len(ids), None


def some_text_params(random: Random) -> TextParams:
    stops = ["", "two", ", t", "e, f", "\n\n", "字", " ", "###", "rée"]
    return TextParams(
        stop=tuple(random.sample(stops, random.randrange(3))),
        keep_stop=random.random() < 0.3,
        min_new_tokens=random.choice([0, 0, random.randrange(8)]),
        skip_special_tokens=random.random() < 0.5,
        stream=random.random() < 0.7,
        stream_interval=random.randrange(1, 5),
    )


def some_ids(random: Random) -> list[int]:
    if random.random() < 0.5:
        return WORDS.encode(random.choice(["one, two, three", "a\n\nb ### 漢字", " two  spaces", "rée, fée"]))
    return random.choices(range(WORDS.backend.get_vocab_size()), k=random.randrange(1, 13))


@pytest.mark.parametrize("seed", range(150))
def test_every_sequence_is_told_whole_and_ends_once(seed: int) -> None:
    """Several sequences in random steps, some with several tokens in a step, read by handle calls of random size."""
    random = Random(seed)
    sequences = {uid: (some_ids(random), some_text_params(random), random.random() < 0.5) for uid in range(4)}
    messages: list[ToDetokenizer] = [Begin(uid, 5, text) for uid, (_, text, _) in sequences.items()]
    ahead = {uid: list(ids) for uid, (ids, _, _) in sequences.items()}
    while ahead:
        pairs: list[tuple[int, int]] = []
        extras = []
        for uid in random.sample(sorted(ahead), len(ahead)):
            taken = [ahead[uid].pop(0) for _ in range(min(random.randrange(3), len(ahead[uid])))]
            pairs += [(uid, token) for token in taken]
            done = not ahead[uid]
            if taken or done:
                scored = scores(taken) if sequences[uid][2] and taken else None
                extras.append(Extra(uid, scored, finish=LENGTH if done else None, stats=STATS if done else None))
            if done:
                del ahead[uid]
        messages.append(tokens(pairs, *extras))
    talk = Conversation()
    while messages:
        size = random.randrange(1, 4)
        talk.handle(*messages[:size])
        del messages[:size]
    for uid, (ids, text, scored) in sequences.items():
        whole, count, stop = stop_at(ids, text)
        deltas = talk.of(uid)
        assert talk.text(uid) == whole
        assert talk.ids(uid) == ids[:count]
        assert [delta.finish for delta in deltas] == [None] * (len(deltas) - 1) + [
            Finish("stop", stop) if stop else LENGTH
        ]
        assert deltas[-1].completion_tokens == count == deltas[-1].stats.completion_tokens  # type: ignore[union-attr]
        assert list(itertools.accumulate(len(delta.ids) for delta in deltas)) == [d.completion_tokens for d in deltas]
        assert text.stream or len(deltas) == 1
        assert all(delta.text or delta.scores for delta in deltas[:-1])
        for delta in deltas:
            assert delta.scores == (scores(delta.ids) if scored and delta.ids else None)
    assert len(talk.stops) == len(set(talk.stops))
    assert all(talk.of(uid)[-1].finish.kind == "stop" for uid in talk.stops)  # type: ignore[union-attr]


def test_a_stream_speaks_at_once_and_then_every_interval() -> None:
    ids = WORDS.encode("zyxwvutsrqp")
    assert len(ids) == 11
    talk = say(ids, TextParams(stream=True, stream_interval=3))
    assert [len(delta.ids) for delta in talk.deltas] == [1, 3, 3, 3, 1]


def test_tokens_that_arrive_together_make_one_delta() -> None:
    talk = Conversation()
    ids = WORDS.encode("abcd")
    fresh = talk.handle(Begin(1, 5, TextParams(stream=True)), *(tokens([(1, token)]) for token in ids))
    assert [(delta.text, delta.ids) for delta in fresh] == [("abcd", ids)]


def test_held_back_text_waits_unless_scores_are_told() -> None:
    ids = WORDS.encode("🙂")
    assert len(ids) > 1
    talk = Conversation()
    talk.handle(Begin(1, 5, TextParams(stream=True)), Begin(2, 5, TextParams(stream=True)))
    for token in ids[:-1]:
        fresh = talk.handle(tokens([(1, token), (2, token)], Extra(2, scores([token]))))
        assert [(delta.uid, delta.text, delta.ids) for delta in fresh] == [(2, "", [token])]
    fresh = talk.handle(tokens([(1, ids[-1]), (2, ids[-1])], Extra(2, scores(ids[-1:]))))
    assert [(delta.text, delta.ids) for delta in fresh] == [("🙂", ids), ("🙂", ids[-1:])]


def test_a_stop_string_ends_the_sequence_for_the_api_and_the_engine() -> None:
    ids = WORDS.encode("one, two, three")
    talk = Conversation()
    talk.handle(Begin(1, 5, TextParams(stop=("two",), stream=True)))
    for index, token in enumerate(ids):
        talk.handle(tokens([(1, token)], *([Extra(1, stats=STATS)] if index == 0 else [])))
    assert talk.text(1) == "one, "
    assert talk.stops == [1]
    end = talk.deltas[-1]
    count = end.completion_tokens
    assert WORDS.decode(ids[:count]).startswith("one, two")
    assert not WORDS.decode(ids[: count - 1]).startswith("one, two")
    assert end.finish == Finish("stop", "two")
    assert end.stats == Stats(5, count, 3, 1, 100.0, 101.0, 102.0, NOW)
    # What the engine still says of it, its own end last, reaches nobody; the uid is forgotten with it.
    assert talk.handle(tokens([(1, 3)]), tokens([], Extra(1, finish=Finish("stop"), stats=STATS))) == []
    assert talk.handle(Begin(1, 5, TextParams()), tokens([(1, ids[0])], Extra(1, finish=LENGTH, stats=STATS))) != []


def test_stats_of_a_stop_without_word_from_the_engine_are_what_is_known() -> None:
    talk = Conversation()
    talk.handle(Begin(1, 5, TextParams(stop=("x",))), tokens([(1, WORDS.encode("x")[0])]))
    assert talk.deltas[0].stats == Stats(5, 1, 0, 0, 0.0, 0.0, 0.0, NOW)


def test_a_stop_beats_the_end_that_comes_with_its_token() -> None:
    ids = WORDS.encode("ab")
    for finish in (LENGTH, Finish("stop", WORDS.eos)):
        talk = say([*ids, WORDS.eos] if finish.kind == "stop" else ids, TextParams(stop=("b",)), finish)
        assert (talk.text(1), talk.deltas[-1].finish) == ("a", Finish("stop", "b"))
    talk = say(ids, TextParams(stop=("b",)))
    assert talk.stops == []  # the engine has ended it itself
    assert talk.deltas[-1].stats == Stats(5, 2, 3, 1, 100.0, 101.0, 102.0, 103.0)


def test_stop_patterns_report_what_matched() -> None:
    talk = say(WORDS.encode("a1 b22 c"), TextParams(stop_regex=(r"\d\d",), stream=True))
    assert (talk.text(1), talk.deltas[-1].finish) == ("a1 b", Finish("stop", "22"))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_the_token_that_ends_a_sequence_is_shown_only_when_kept(keep: bool, skip: bool, stream: bool) -> None:
    text = TextParams(keep_stop=keep, skip_special_tokens=skip, stream=stream)
    words = WORDS.encode("hello")
    talk = say([*words, WORDS.eos], text, Finish("stop", WORDS.eos))
    assert talk.text(1) == ("hello<|end|>" if keep and not skip else "hello")
    assert talk.ids(1) == [*words, WORDS.eos]
    plain = WORDS.encode("x")[0]
    talk = say([*words, plain], text, Finish("stop", plain))
    assert talk.text(1) == ("hellox" if keep else "hello")
    assert talk.deltas[-1].completion_tokens == len(words) + 1
    talk = say([*words, plain], text, LENGTH)
    assert talk.text(1) == "hellox"


def test_ignored_ends_of_text_count_and_show_as_asked() -> None:
    for skip, text in ((True, ""), (False, "<|end|>" * 8)):
        for stream in (True, False):
            talk = say([WORDS.eos] * 8, TextParams(skip_special_tokens=skip, stream=stream))
            assert talk.text(1) == text
            assert talk.deltas[-1].completion_tokens == 8


def test_the_end_shows_what_was_held_back() -> None:
    for finish in (LENGTH, Finish("abort", None, "cancelled")):
        talk = say(WORDS.encode("one, t"), TextParams(stop=(", two",), stream=True), finish)
        assert talk.text(1) == "one, t"
        assert talk.deltas[-1].finish == finish
    cut = WORDS.encode("a🙂")[:-1]
    assert say(cut, TextParams(stream=True)).text(1) == say(cut, TextParams()).text(1) == WORDS.decode(cut) == "a\ufffd"


def test_a_newline_in_bytes_stops_at_its_own_token() -> None:
    words = vocab.byte_fallback()
    newline, piece = (words.backend.token_to_id(token) for token in ("<0x0A>", "▁hello"))
    detokenizer = Detokenizer(words)
    detokenizer.handle([Begin(1, 1, TextParams(stop=("\n",)))])
    texts, stops = detokenizer.handle([tokens([(1, piece)]), tokens([(1, newline)])])
    assert texts is not None
    assert [(d.text, d.completion_tokens, d.finish) for d in texts.deltas] == [("hello", 2, Finish("stop", "\n"))]
    assert stops == [Stop(1)]


def test_prompt_scores_are_told_once_in_one_piece() -> None:
    parts = [Extra(1, prompt_scores=scores([7, 8])), Extra(1, prompt_scores=scores([9]))]
    a, b = WORDS.encode("ab")
    for stream in (True, False):
        talk = Conversation()
        talk.handle(Begin(1, 3, TextParams(stream=stream)), tokens([], parts[0]))
        assert talk.deltas == []
        talk.handle(tokens([(1, a)], parts[1]))
        talk.handle(tokens([(1, b)], Extra(1, finish=LENGTH, stats=STATS)))
        told = [delta.prompt_scores for delta in talk.deltas]
        assert told == ([scores([7, 8, 9]), None] if stream else [scores([7, 8, 9])])


def test_scoring_alone_has_no_tokens() -> None:
    talk = Conversation()
    end = Extra(1, prompt_scores=scores([7]), finish=LENGTH, stats=STATS)
    talk.handle(Begin(1, 3, TextParams()), tokens([], end))
    assert talk.deltas == [TextDelta(1, prompt_scores=scores([7]), finish=LENGTH, stats=STATS)]


def test_a_failure_of_the_engine_is_passed_on_once() -> None:
    fault = Fault(504, "timeout", "too slow")
    talk = Conversation()
    talk.handle(Begin(1, 3, TextParams(stop=("b",))), Begin(2, 3, TextParams()))
    a, b = WORDS.encode("ab")
    talk.handle(tokens([(1, b), (2, a)]))
    talk.handle(Failed(1, fault, STATS), Failed(2, fault, STATS), Failed(3, fault))
    assert [delta.fault for delta in talk.of(1)] == [None]  # it had already ended
    assert talk.of(2) == [TextDelta(2, completion_tokens=1, fault=fault, stats=STATS)]
    assert talk.of(3) == [TextDelta(3, fault=fault)]


@pytest.mark.parametrize("text", [TextParams(stream=True), TextParams(), TextParams(stop=("zz",))])
def test_one_bad_sequence_fails_alone(text: TextParams, caplog: pytest.LogCaptureFixture) -> None:
    a, b = WORDS.encode("ab")
    talk = Conversation()
    talk.handle(Begin(1, 3, text), Begin(2, 3, TextParams()))
    talk.handle(tokens([(1, -5), (2, a)]))
    talk.handle(tokens([(1, a), (2, b)], Extra(1, finish=LENGTH, stats=STATS), Extra(2, finish=LENGTH, stats=STATS)))
    assert [delta.fault.status for delta in talk.of(1) if delta.fault] == [500]
    assert len(talk.of(1)) == 1
    assert talk.text(2) == "ab"
    assert talk.stops == ([] if text == TextParams() else [1])  # a plain sequence is decoded when it has ended


def test_stops_that_do_not_compile_are_a_fault_of_their_sequence() -> None:
    talk = Conversation()
    talk.handle(Begin(1, 3, TextParams(stop_regex=("(",))))
    assert [delta.fault.status for delta in talk.deltas if delta.fault] == [400]
    assert talk.stops == [1]
    assert talk.handle(tokens([(1, 3)], Extra(1, finish=Finish("stop"), stats=STATS))) == []


def test_the_end_of_an_unknown_sequence_is_a_fault() -> None:
    talk = Conversation()
    assert talk.handle(tokens([(9, 1)])) == []
    (delta,) = talk.handle(tokens([(9, 1)], Extra(9, finish=LENGTH, stats=STATS)))
    assert delta.fault is not None
    assert delta.fault.status == 500
    assert talk.stops == []


def test_nobody_is_left_waiting_when_the_engine_leaves() -> None:
    talk = Conversation()
    talk.handle(Begin(1, 3, TextParams(stream=True)), Begin(2, 3, TextParams()), tokens([(1, 70)]))
    fresh = talk.handle(Goodbye())
    assert [(delta.uid, delta.fault.status) for delta in fresh if delta.fault] == [(1, 503), (2, 503)]
    assert talk.handle(Goodbye()) == []


def test_run_serves_over_sockets_until_goodbye(tmp_path: Path) -> None:
    context: zmq.Context[Any] = zmq.Context()
    inbox: ZmqInbox[ToDetokenizer] = ZmqInbox(context, f"ipc://{tmp_path}/d", ToDetokenizer)
    engine: ZmqOutbox[ToDetokenizer] = ZmqOutbox(context, inbox.address)
    texts: LocalLink[Texts] = LocalLink()
    stops: list[Stop] = []
    thread = threading.Thread(target=run, args=(inbox, texts, Callback(stops.append), WORDS))
    thread.start()
    engine.send(Begin(1, 5, TextParams(stop=("b",), stream=True)))
    engine.send(tokens([(1, WORDS.encode("a")[0])]))
    assert [delta.text for message in texts.receive(10) for delta in message.deltas] == ["a"]
    engine.send(tokens([(1, WORDS.encode("b")[0])]))
    assert [delta.finish for message in texts.receive(10) for delta in message.deltas] == [Finish("stop", "b")]
    begin = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - begin < 0.05  # it waits without polling
    assert thread.is_alive()
    engine.send(Goodbye())
    thread.join(10)
    assert not thread.is_alive()
    assert stops == [Stop(1)]
    engine.close()
    inbox.close()
    context.term()


@pytest.mark.parametrize("text", [TextParams(stream=True), TextParams(stream=True, stop=("\nUser:", "###"))])
def test_a_step_of_256_sequences_is_quick(text: TextParams) -> None:
    detokenizer = Detokenizer(WORDS)
    detokenizer.handle([Begin(uid, 5, text) for uid in range(256)])
    ids = itertools.cycle(WORDS.encode("hello world, one, two, čtyřlístek 漢字"))
    times = []
    for token in itertools.islice(ids, 60):
        message = tokens([(uid, token) for uid in range(256)])
        begin = time.perf_counter()
        detokenizer.handle([message])
        times.append(time.perf_counter() - begin)
    assert statistics.median(times) < 0.02  # measured: under 1 ms; the rest is room for a busy machine


@pytest.mark.parametrize("stream_interval", [0, 1, 3])
def test_pieces(stream_interval: int) -> None:
    """Text is taken apart as it comes; a special token that is a marker reaches the parser, another one is hidden."""
    user = WORDS.backend.token_to_id("<|user|>")
    ids = [*WORDS.encode("<|channel|>analysis<|message|>hello world"), user, WORDS.eos]
    thoughts = len(ids)
    call = '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
    ids += [*WORDS.encode(call), WORDS.eos, *WORDS.encode("<|start|>assistant<|channel|>final<|message|>one, two")]
    parsing = Parsing(tools="gpt-oss", reasoning="gpt-oss", names=("f",))
    text = TextParams(parsing=parsing, stream=stream_interval > 0, stream_interval=max(1, stream_interval))
    talk = say(ids, text)
    assert joined(piece for delta in talk.of(1) for piece in delta.pieces) == [
        Piece("reasoning", "hello world"),
        Piece("call", "f"),
        Piece("arguments", '{"a": 1}'),
        Piece("text", "one, two"),
    ]
    last = talk.of(1)[-1]
    header = len(WORDS.encode("<|channel|>analysis<|message|>"))
    assert thoughts - header <= last.reasoning_tokens <= thoughts - header + 1  # the token that ends the header is one


def test_stops_are_looked_for_in_the_text_before_it_is_taken_apart() -> None:
    ids = WORDS.encode('<tool_call>{"name": "f", "arguments": {"a": "one, two, three"}}</tool_call>')
    talk = say(ids, TextParams(stop=("two",), parsing=Parsing(tools="hermes")))
    (delta,) = talk.of(1)
    assert delta.pieces == [Piece("call", "f"), Piece("arguments", '{"a": "one, ')]
    assert delta.finish == Finish("stop", "two")


def test_an_unknown_format_ends_its_request_alone() -> None:
    talk = Conversation()
    talk.handle(Begin(1, 5, TextParams(parsing=Parsing(tools="nope"))))
    (delta,) = talk.of(1)
    assert delta.fault is not None and delta.fault.status == 400 and talk.stops == [1]
