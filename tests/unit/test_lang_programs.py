"""Programs as they run: what they append, read, fork and join, whole and as streams, one and many."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

import radixlm as rl
from radixlm import Engine
from radixlm.base.errors import Unavailable
from radixlm.lang import ProgramError, Scheduling
from radixlm.lang.home import home
from support.live import until
from support.programs import Held, null_engine

GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 6}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with null_engine() as engine:
        yield engine


@rl.function
def quiz(s: Any, topic: str) -> Any:
    s += "This is a quiz of three questions with short answers, made for people who know nothing. "
    s += "Topic: " + topic + "\nQ:" + rl.gen("question", max_tokens=7, stop="\n")
    forks = s.fork(3)
    for i, fork in enumerate(forks):
        fork += f"\nAnswer {i}:" + rl.gen("answer")
    forks.join()
    with s.var_scope("verdict"):
        s += "\nBest: " + rl.select("best", [" the first", " the second", " none"])
    return len(s["answer"])


@rl.function
def talk(s: Any, words: str) -> None:
    s += rl.system("You are kind.")
    s += rl.user(words)
    s += rl.assistant("Well," + rl.gen("first"))
    with s.user():
        s += "And "
        s += "then?"
    s.assistant(rl.gen("second", max_tokens=9))


def test_a_program_is_the_calls_that_it_stands_for(engine: Engine) -> None:
    state = quiz.run("cats", backend=engine, **GREEDY)

    def call(prompt: str, **params: Any) -> str:
        return str(engine.generate(prompt, {**GREEDY, **params})["text"])

    head = "This is a quiz of three questions with short answers, made for people who know nothing. Topic: cats\nQ:"
    question = call(head, max_new_tokens=7, stop="\n")
    assert state["question"] == question
    assert state["answer"] == [call(f"{head}{question}\nAnswer {i}:") for i in range(3)]
    assert state["verdict"] == f"\nBest: {state['best']}" and state["best"] in (" the first", " the second", " none")
    assert state.text() == f"{head}{question}{state['verdict']}"
    assert state.ret_value == 3 and state.error() is None and "best" in state and "worst" not in state
    assert state.get_meta_info("question")["completion_tokens"] == 7


def test_a_chat_is_what_the_template_renders(engine: Engine) -> None:
    state = talk.run("hello", backend=engine, **GREEDY)
    messages = state.messages()
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert messages[2]["content"] == "Well," + state["first"] and messages[3]["content"] == "And then?"
    rendered = engine.render(messages, add_generation_prompt=False)
    assert state.text() == engine.decode(rendered, skip_special_tokens=False)
    turn = engine.generate(None, {**GREEDY, "max_new_tokens": 9}, input_ids=engine.render(messages[:4]))
    assert turn["text"] == state["second"]


def test_turns_share_their_prefix(engine: Engine) -> None:
    state = talk.run("Tell me of the sea, the wind and all the ships that went down in it.", backend=engine, **GREEDY)
    first, second = state.get_meta_info("first"), state.get_meta_info("second")
    # made-up text may tokenize otherwise when it is read again, so the hit may end where it begins
    assert second["cached_tokens"] >= first["prompt_tokens"] - 1


def test_a_fork_computes_its_prefix_once(engine: Engine) -> None:
    @rl.function
    def wide(s: Any) -> None:
        s += "Once there was a long story that nobody had told before. " * 5
        for fork in s.fork(8):
            fork += rl.gen("end", max_tokens=3)

    engine.flush_cache()
    before = engine.stats()
    seen: list[Any] = []

    @rl.function
    def keep(s: Any) -> None:
        s += "Once there was a long story that nobody had told before. " * 5
        seen.extend(s.fork(8))
        for fork in seen:
            fork += rl.gen("end", max_tokens=3)

    keep.run(backend=engine, **GREEDY)
    metas = [fork.get_meta_info("end") for fork in seen]
    assert all(meta["cached_tokens"] == meta["prompt_tokens"] - 1 for meta in metas)
    after = engine.stats()
    computed = after["prompt_tokens"] - after["cached_tokens"] - before["prompt_tokens"] + before["cached_tokens"]
    assert computed == metas[0]["prompt_tokens"] + 8


@pytest.mark.parametrize("program", [quiz, talk])
def test_streams_say_the_same(engine: Engine, program: Any) -> None:
    whole = program.run("dogs", backend=engine, **GREEDY)
    stream = program.run("dogs", backend=engine, stream=True, **GREEDY)
    name = "question" if program is quiz else "first"
    assert "".join(stream.text_iter(name)) == whole[name]
    pieces = list(stream.text_iter())
    assert "".join(pieces) == whole.text() == stream.text() and len(pieces) > 3

    async def listen() -> tuple[list[str], list[Any]]:
        state = program.run("dogs", backend=engine, stream=True, **GREEDY)
        texts = [piece async for piece in state.text_async_iter()]
        return texts, [pair async for pair in state.text_async_iter(name, return_meta_data=True)]

    texts, pairs = asyncio.run(listen())
    assert "".join(texts) == whole.text()
    assert "".join(text for text, _ in pairs) == whole[name] and pairs[-1][1]["completion_tokens"] > 0
    assert list(whole.text_iter(name)) == [whole[name]]
    assert asyncio.run(stream.async_get_var(name)) == whole[name]


def test_a_streamed_program_is_read_before_it_has_begun() -> None:
    """Reading waits for what the program has not come to yet, and for no longer than the program."""
    held, backend = threading.Event(), Held()
    home().call(backend.open.set)

    @rl.function
    def slow(s: Any, fail: bool = False) -> None:
        held.wait(30)
        s += "a" + rl.gen("x")
        assert "y" not in s
        with pytest.raises(ProgramError, match="there is no variable 'y'"):
            s.get_var("y")  # the program itself is not outside of itself
        if fail:
            raise KeyError("gone")

    state, failing = (slow.run(fail=fail, backend=backend, stream=True) for fail in (False, True))

    async def read(name: str) -> Any:
        return await state.async_get_var(name)

    with ThreadPoolExecutor(8) as pool:
        found = [pool.submit(state.get_var, "x"), pool.submit(asyncio.run, read("x")), pool.submit(lambda: state["x"])]
        text, missing = pool.submit(state.text), pool.submit(state.get_var, "y")
        failed = pool.submit(failing.get_var, "y")
        held.set()
        assert [one.result(30) for one in found] == ["<128>"] * 3
        assert text.result(30) == "a<128>"
        with pytest.raises(ProgramError, match="the program has ended, and there is no variable 'y' in it"):
            missing.result(30)
        with pytest.raises(ProgramError, match="KeyError: 'gone'"):
            failed.result(30)
    with pytest.raises(ProgramError, match="there is no variable 'y'; there are x"):
        state.get_var("y")


def test_a_stream_here_needs_no_thread(engine: Engine) -> None:
    state = talk.run("dogs", backend=engine, stream=True, use_thread=False, **GREEDY)
    assert "".join(state.text_iter()) == talk.run("dogs", backend=engine, **GREEDY).text()


@pytest.mark.parametrize("threads", ["auto", 1, 3])
@pytest.mark.parametrize("lazy", [False, True])
def test_batches_are_runs(engine: Engine, threads: Any, lazy: bool) -> None:
    topics = [f"topic {i}" for i in range(12)]
    alone = [quiz.run(topic, backend=engine, **GREEDY) for topic in topics]
    items: list[Any] = [{"topic": topic} for topic in topics[:6]] + [(topic,) for topic in topics[6:]]
    states = list(quiz.run_batch(items, backend=engine, num_threads=threads, generator_style=lazy, **GREEDY))
    assert [state.text() for state in states] == [state.text() for state in alone]
    assert [state["answer"] for state in states] == [state["answer"] for state in alone]
    assert [state.ret_value for state in states] == [3] * 12


def test_a_batch_computes_what_all_begin_with_once(engine: Engine) -> None:
    @rl.function
    def shots(s: Any, examples: str, question: str) -> None:
        s += "Answer as in the examples, without any words around the answer itself.\n" + examples + question
        s += rl.gen("answer", max_tokens=2)

    examples = "".join(f"Q: {i} + {i}\nA: {2 * i}\n" for i in range(10))
    items = [{"examples": examples, "question": f"Q: {i}\nA:"} for i in range(6)]
    engine.flush_cache()
    states = shots.run_batch(items, backend=engine, **GREEDY)
    shared = len(engine.encode(examples))
    assert all(state.get_meta_info("answer")["cached_tokens"] >= shared for state in states)
    engine.flush_cache()
    assert shots.bind(examples=examples).cache(engine).endswith(examples)
    assert shots.cache(engine).startswith("Answer as") and not shots.bind(examples="").cache(engine).endswith(examples)


def test_progress_is_shown(engine: Engine, capfd: pytest.CaptureFixture[str]) -> None:
    talk.run_batch([{"words": "a"}, {"words": "b"}], backend=engine, progress_bar=True, **GREEDY)
    assert "2/2" in capfd.readouterr().err


def test_joins(engine: Engine) -> None:
    @rl.function
    def program(s: Any) -> None:
        s += "List:"
        s["given"] = 7
        forks = s.fork(2)
        forks += lambda i: f" item {i}"
        forks += [" one" + rl.gen("x"), " two"]
        forks.join("concate_and_append")
        with s.copy() as other:
            other += " aside" + rl.gen("x")
        s.set_var("copied", other["x"])
        more = s.fork(3)
        more[0] += rl.gen("x") + rl.gen("y")
        more[2] += rl.gen("x")
        more.join()

    state = program.run(backend=engine, **GREEDY)
    assert state["given"] == 7 and len(state["x"]) == 2 and len(state["y"]) == 1
    assert state.text().startswith("List: item 0 one") and state.text().endswith(" item 1 two")
    assert isinstance(state["copied"], str)


def test_chats_fork_and_join(engine: Engine) -> None:
    @rl.function
    def program(s: Any) -> None:
        s += rl.user("Name two things.")
        s += rl.assistant_begin()
        forks = s.fork(2)
        forks += lambda i: f"{i}:" + rl.gen("thing") + "\n"
        forks.join("concate_and_append")
        s += rl.assistant_end()
        turns = s.fork(2)
        turns += lambda i: rl.user(f"More {i}") + rl.assistant(rl.gen("more"))
        turns.join("concate_and_append")

    state = program.run(backend=engine, **GREEDY)
    assert [m["role"] for m in state.messages()] == ["user", "assistant"] + ["user", "assistant"] * 2
    assert state.messages()[1]["content"].startswith("0:")
    assert state.text() == engine.decode(
        engine.render(state.messages(), add_generation_prompt=False), skip_special_tokens=False
    )
    stream = program.run(backend=engine, stream=True, **GREEDY)
    assert "".join(stream.text_iter()) == state.text()


def test_several_texts_logprobs_and_reasoning(engine: Engine) -> None:
    @rl.function
    def program(s: Any) -> None:
        s += "Begin: <think>"
        s += rl.gen("several", n=3, seed=5, temperature=1.0) + " "
        s += rl.gen("scored", return_logprob=True, top_logprobs_num=2)
        s += rl.separate_reasoning("now " + rl.gen("answer"), "qwen3")

    state = program.run(backend=engine, **GREEDY)
    assert len(state["several"]) == 3 and f"<think>{state['several'][0]} " in state.text()
    assert len(state.get_meta_info("scored")["output_top_logprobs"]) == 6
    assert state["answer"] and state["answer_reasoning_content"] == ""


@pytest.mark.parametrize(
    ("text", "kind", "thought", "answer"),
    [
        ("<think>hm, 2</think>\n\nTwo.", "qwen3", "hm, 2", "Two."),
        ("hm, 2</think>Two.", "auto", "hm, 2", "Two."),
        ("<think>never done", "deepseek-r1", "never done", ""),
        (" Two.", "auto", "", " Two."),
        ("◁think▷hm◁/think▷Two.", "kimi", "hm", "Two."),
    ],
)
def test_reasoning_is_put_aside(text: str, kind: str, thought: str, answer: str) -> None:
    backend = Held(says=text)
    home().call(backend.open.set)

    @rl.function
    def program(s: Any) -> None:
        s += rl.user("What?") + rl.assistant("So: " + rl.separate_reasoning(rl.gen("a") + " Done.", kind))

    state = program.run(backend=backend)
    assert (state["a_reasoning_content"], state["a"]) == (thought, answer)
    assert state.messages()[-1]["content"] == f"So: {answer} Done."


def test_grammars(engine: Engine) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}

    @rl.function
    def program(s: Any) -> None:
        s += "Numbers: " + rl.gen_int("int") + " " + rl.gen("float", dtype=float) + " " + rl.gen("bool", dtype=bool)
        s += " " + rl.gen("regex", regex="[ab]{3,5}!") + rl.gen("json", json_schema=schema)

    state = program.run(backend=engine, temperature=0, max_new_tokens=40)
    assert state.error() is None
    int(state["int"])
    float(state["float"])
    assert state["bool"] in ("True", "False") and re.fullmatch("[ab]{3,5}!", state["regex"])
    assert json.loads(state["json"])["a"] in (1, 2)
    assert program.compile(engine).run(temperature=0, max_new_tokens=40).text() == state.text()


def test_programs_call_programs(engine: Engine) -> None:
    @rl.function
    def outer(s: Any, words: str) -> Any:
        talk(s, words)
        return talk(words, backend=engine, **GREEDY)["second"]

    state = outer.run("hello", backend=engine, **GREEDY)
    assert state["second"] == state.ret_value


def test_failures_surface_where_the_state_is_used() -> None:
    backend = Held(fail=Unavailable("the machine is on fire"))
    home().call(backend.open.set)

    @rl.function
    def program(s: Any, read: bool) -> None:
        s += "a"
        s += rl.gen("x")
        fork = s.copy()
        fork += rl.gen("y")
        s["other"] = 1
        if read:
            assert fork["y"]

    state = program.run(read=False, backend=backend)
    assert state["other"] == 1
    for use in (lambda: state["x"], state.text, state.sync, state.messages, lambda: state.get_meta_info("x")):
        with pytest.raises(ProgramError, match=r"test_lang_programs.py:\d+: the machine is on fire") as caught:
            use()
        assert caught.value.status == 503
    assert state.error() is caught.value
    with pytest.raises(ProgramError, match="the machine is on fire"):
        program.run(read=True, backend=backend)
    stream = program.run(read=True, stream=True, backend=backend)
    with pytest.raises(ProgramError, match="the machine is on fire"):
        list(stream.text_iter("x"))
    bad, good = program.run_batch([{"read": True}, {"read": False}], backend=backend)
    assert bad.error() is not None and good["other"] == 1
    with pytest.raises(ProgramError, match="on fire"):
        _ = bad.ret_value


def test_what_the_program_raises_ends_its_states() -> None:
    backend = Held()

    @rl.function
    def program(s: Any) -> None:
        s += rl.gen("x")
        raise KeyError("mine")

    with pytest.raises(KeyError):
        program.run(backend=backend)
    state = program.run(backend=backend, stream=True)
    with pytest.raises(ProgramError, match=r"test_lang_programs.py:\d+: KeyError: 'mine'"):
        list(state.text_iter())
    (state,) = program.run_batch([{}], backend=backend)
    assert state.error() is not None
    with pytest.raises(KeyError):
        _ = state.ret_value
    until(lambda: backend.now == 0, what="the end of an ended program's calls")


def test_a_run_can_be_cancelled(engine: Engine) -> None:
    @rl.function
    def endless(s: Any) -> None:
        s += "a"
        forks = s.fork(3)
        forks += rl.gen("x", max_tokens=8000, ignore_eos=True)
        forks.join()
        s += rl.gen("y")

    state = endless.run(backend=engine, stream=True, temperature=0)
    next(state.text_iter())
    until(lambda: engine.stats()["running"] == 3, what="calls of all forks")
    state.cancel()
    with pytest.raises(ProgramError, match=r"test_lang_programs.py:\d+: the program was cancelled"):
        list(state.text_iter())
    with pytest.raises(ProgramError, match="cancelled"):
        state["y"]
    until(lambda: not engine.stats()["running"], what="the end of a cancelled program's calls")


def test_ten_thousand_states_are_cheap() -> None:
    """No thread for a state: they start within 2 s, live within 1 GiB, and all of them wait at once."""
    process = psutil.Process()
    taken: list[float] = []
    gc.collect()
    gc.freeze()  # what other tests of this process keep is not looked through again and again
    while not taken or (min(taken) >= 2.0 and len(taken) < 6):  # on a busy machine the same work takes longer
        backend = Held(Scheduling(limit=20_000))
        states: list[Any] = []

        @rl.function
        def program(s: Any, states: list[Any] = states) -> None:
            s += "go"
            states.extend(s.fork(10_000))
            for state in states:
                state += rl.gen("x")

        before, threads, started = process.memory_info().rss, process.num_threads(), time.process_time()
        program.run(backend=backend)
        while backend.now < 10_000:
            time.sleep(0.01)
        taken.append(time.process_time() - started)
        assert process.num_threads() <= threads + 1
        assert process.memory_info().rss - before < 1 << 30
        home().call(backend.open.set)
        assert {state["x"] for state in states} == {"<128>"}
    gc.unfreeze()
    assert min(taken) < 2.0, taken


def test_no_program_keeps_another_waiting() -> None:
    """Calls of programs take turns: a late one with one call is served among the first of a wide one."""
    backend = Held(Scheduling(limit=4))

    @rl.function
    def wide(s: Any) -> None:
        for i in range(200):
            fork = s.copy()
            fork += f"wide {i}" + rl.gen("x")

    @rl.function
    def late(s: Any) -> None:
        s += "late" + rl.gen("x")

    wide.run(backend=backend)
    state = late.run(backend=backend, stream=True)
    until(lambda: backend.gate.waiting == 2, what="a call of each program that waits")
    home().call(backend.open.set)
    state.sync()
    order = [prompt.text for prompt in backend.prompts]
    assert order.index("late") <= 8 and backend.most == 4


def test_one_call_of_a_program_at_a_time() -> None:
    backend = Held(Scheduling(parallel=False))
    home().call(backend.open.set)

    @rl.function
    def wide(s: Any) -> Any:
        forks = s.fork(5)
        forks += rl.gen("x")
        forks.join()
        return s["x"]

    assert wide.run(backend=backend).ret_value == ["<128>"] * 5
    assert backend.most == 1


def test_hints_are_sent_only_where_they_are_worth_a_call() -> None:
    def prefixes(**scheduling: Any) -> list[str]:
        backend = Held(Scheduling(**scheduling))
        home().call(backend.open.set)

        @rl.function
        def program(s: Any, length: int) -> None:
            s += "x" * length
            forks = s.fork(2)
            forks += rl.gen("a")
            forks.join()
            s += "y" * length + rl.gen("b") + "z"
            s.fork(2).join()

        for length in (100, 10):
            assert program.run(length=length, backend=backend).error() is None
        return [prompt.text for prompt in backend.prefilled]

    assert prefixes() == ["x" * 100]
    assert prefixes(hints=False) == []
