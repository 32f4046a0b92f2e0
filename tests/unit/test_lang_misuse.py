"""Mistakes in programs: each raises one error that says what is wrong, at the line where it is, before any call."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

import radixlm as rl
from radixlm.base.errors import BadRequest, NotServed
from radixlm.lang import ProgramError, TraceError
from radixlm.lang.backends.base import ABILITIES
from support.programs import Held


def nested_roles(s: Any) -> None:
    s += rl.user("a" + rl.system("b"))


def role_left_open(s: Any) -> None:
    s += rl.user_begin()
    s += rl.assistant("b")


def role_not_begun(s: Any) -> None:
    s += rl.user_end()


def text_between_messages(s: Any) -> None:
    s += rl.user("a")
    s += "b"


def chat_after_text(s: Any) -> None:
    s += "a"
    s += rl.user("b")


def undefined_variable(s: Any) -> None:
    s["a"] = 1
    s += s["b"]


def no_variable_at_all(s: Any) -> None:
    s.get_meta_info("b")


def fork_of_a_finished_state(s: Any) -> None:
    fork = s.fork(1)
    fork.join()
    fork[0].fork(2)


def text_for_a_joined_state(s: Any) -> None:
    forks = s.fork(2)
    forks.join()
    forks += "more"


def joined_twice(s: Any) -> None:
    forks = s.fork(2)
    forks.join()
    forks.join()


def unknown_join(s: Any) -> None:
    s.fork(2).join("somehow")


def roles_cut_by_a_fork(s: Any) -> None:
    forks = s.fork(2)
    forks += rl.user_begin()
    forks.join("concate_and_append")


def fork_into_none(s: Any) -> None:
    s.fork(0)


def uneven_fork(s: Any) -> None:
    forks = s.fork(3)
    forks += ["a", "b"]


def no_choices(s: Any) -> None:
    s += rl.select("a", [])


def choices_alike(s: Any) -> None:
    s += rl.gen("a", choices=["x", "y", "x"])


def drawn_choice(s: Any) -> None:
    s += rl.select("a", ["x", "y"], temperature=0.7)


def unknown_method(s: Any) -> None:
    s += rl.select("a", ["x", "y"], choices_method="best")


def choices_with_a_stop(s: Any) -> None:
    s += rl.gen("a", choices=["x", "y"], stop="z")


def two_grammars(s: Any) -> None:
    s += rl.gen("a", regex="a", json_schema="{}")


def dtype_with_a_grammar(s: Any) -> None:
    s += rl.gen_int("a", regex="a")


def wrong_type(s: Any) -> None:
    s += rl.gen("a", max_tokens="many")  # type: ignore[arg-type]


def nothing_returned(s: Any) -> None:
    s += print("what?")  # type: ignore[func-returns-value]


def a_number(s: Any) -> None:
    s += 7


def image_outside_a_role(s: Any) -> None:
    s += rl.image("cat.png")


def unknown_reasoning(s: Any) -> None:
    s += rl.separate_reasoning(rl.gen("a"), "parrot")


def another_state_in_a_fork(s: Any) -> None:
    forks = s.fork(2)
    forks[0] = s.copy()


MISUSES: list[tuple[Callable[..., None], str]] = [
    (nested_roles, "the role system begins within the role user; roles do not nest"),
    (role_left_open, "the role assistant begins within the role user"),
    (role_not_begun, "the role user ends, but no role is open"),
    (text_between_messages, "there is text between the messages of a chat"),
    (chat_after_text, "the role user follows plain text"),
    (undefined_variable, "there is no variable 'b'; there are a"),
    (no_variable_at_all, "there is no variable 'b'; there are none yet"),
    (fork_of_a_finished_state, "a finished state cannot be forked: it was joined"),
    (text_for_a_joined_state, "the state cannot be extended any more: it was joined"),
    (joined_twice, "the fork was joined before"),
    (unknown_join, "mode is 'somehow'; it is one of gather_variable, concate_and_append"),
    (roles_cut_by_a_fork, "one of its states is within user"),
    (fork_into_none, "a fork into 0 states"),
    (uneven_fork, "2 expressions for 3 states of a fork"),
    (no_choices, "choices is empty"),
    (choices_alike, "choices holds the same text twice"),
    (drawn_choice, "temperature is 0.7; select takes the most likely choice"),
    (unknown_method, "choices_method is 'best'; it is one of token_length_normalized"),
    (choices_with_a_stop, "gen with choices generates nothing, so stop has no meaning there"),
    (two_grammars, "regex and json_schema are given together"),
    (dtype_with_a_grammar, "dtype is a grammar of its own"),
    (wrong_type, "max_new_tokens"),
    (nothing_returned, "None was appended to a state"),
    (a_number, "not by int"),
    (image_outside_a_role, "an image belongs to a message"),
    (unknown_reasoning, "model_type: there is no format 'parrot'"),
    (another_state_in_a_fork, "cannot be replaced by another one"),
]


@pytest.mark.parametrize(("program", "message"), MISUSES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_mistake_is_one_clear_error(program: Callable[..., None], message: str) -> None:
    backend = Held()
    with pytest.raises((ProgramError, BadRequest), match=re.escape(message)) as caught:
        rl.function(program).run(backend=backend)
    if "select" not in program.__name__ and isinstance(caught.value, ProgramError) and caught.value.where:
        file, _, line = caught.value.where.rpartition(":")
        first = program.__code__.co_firstlineno
        assert file == __file__ and first < int(line) < first + 6
    assert not backend.prompts


@pytest.mark.parametrize(
    "program", [nested_roles, undefined_variable, joined_twice, no_choices, a_number, fork_into_none]
)
def test_tracing_finds_it_as_well(program: Callable[..., None]) -> None:
    with pytest.raises(ProgramError, match=re.escape(dict(MISUSES)[program])):
        rl.function(program).trace()


@rl.function
def greedy_reader(s: Any, a: Any, how: str) -> None:
    s += rl.gen("x")
    if how == "f-string":
        s += f"hello {a}"
    elif how == "format":
        s += "hello {}".format(s["x"])
    elif how == "if":
        s += "b" if a else "c"
    elif how == "equals":
        s += "b" if s["x"] == "yes" else "c"
    elif how == "loop":
        for item in a:
            s += item
    elif how == "method":
        s += a.strip()
    elif how == "length":
        s += "x" * len(a)
    elif how == "int":
        s += "x" * int(s["x"])
    elif how == "item":
        s += a[0]
    elif how == "text":
        s += s.text()
    elif how == "meta":
        s += s.get_meta_info("x")


HOWS = ["f-string", "format", "if", "equals", "loop", "method", "length", "int", "item", "text", "meta"]


@pytest.mark.parametrize("how", HOWS)
def test_a_placeholder_has_no_value(how: str) -> None:
    with pytest.raises(TraceError, match="not known while tracing") as caught:
        greedy_reader.trace(how=how)
    assert caught.value.where.startswith(__file__)


def test_programs_are_checked_when_they_are_made() -> None:
    with pytest.raises(ProgramError, match="first parameter of a program is its state, s"):
        rl.function(lambda state: None)
    with pytest.raises(ProgramError, match="'stop' of <lambda> is one of run's own"):
        rl.function(lambda s, stop: None)
    with pytest.raises(ProgramError, match="num_api_spec_tokens is 0"):
        rl.function(num_api_spec_tokens=0)(lambda s: None)


@rl.function
def one(s: Any, a: str) -> None:
    s += a + rl.gen("x")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda b: one.run(backend=b), "missing a required argument: 'a'"),
        (lambda b: one.run("x", c=1, backend=b), "unexpected keyword argument 'c'"),
        (lambda b: one.bind(c=1), "no parameter 'c'"),
        (lambda b: one.run_batch([{"a": "x"}], backend=b, colour="red"), "run_batch has no parameter 'colour'"),
        (lambda b: one.run_batch(["x"], backend=b), "a dict or a tuple of arguments, not str"),
        (lambda b: one.run_batch([{}], backend=b), "missing a required argument: 'a'"),
        (lambda b: one.run_batch([{"a": "x"}], num_threads=0, backend=b), "num_threads is 0"),
        (lambda b: one.compile(b).run(), "the argument 'a' of one is missing"),
        (lambda b: one.compile(b).run(a="x", c="y"), "the argument 'c' of one is not one of the graph's"),
        (lambda b: one.run("x", backend=7), "a backend is an Engine, the URL of a server"),
    ],
)
def test_wrong_arguments(call: Callable[[Any], Any], message: str) -> None:
    backend = Held()
    with pytest.raises(ProgramError, match=re.escape(message)):
        call(backend)
    assert not backend.prompts


def test_no_backend_is_named() -> None:
    from radixlm.lang.home import home

    assert home().backend is None
    with pytest.raises(ProgramError, match="there is no backend"):
        one.run("x")
    rl.set_default_backend(Held())
    try:
        state = one.run("x", stream=True)
        home().call(home().backend.open.set)  # type: ignore[union-attr]
        assert state["x"] == "<128>"
    finally:
        home().backend = home().kept = None


@pytest.mark.parametrize(
    ("lacking", "node"),
    [
        ("regex", lambda: rl.gen("x", regex="a+")),
        ("regex", lambda: rl.gen_int("x")),
        ("json_schema", lambda: rl.gen("x", json_schema={"type": "object"})),
        ("ebnf", lambda: rl.gen("x", ebnf="root ::= 'a'")),
        ("select", lambda: rl.select("x", ["a", "b"])),
        ("logprobs", lambda: rl.gen("x", return_logprob=True)),
        ("n", lambda: rl.gen("x", n=2)),
        ("text", lambda: "a" + rl.gen("x")),
        ("chat", lambda: rl.user("a")),
        ("images", lambda: rl.user(rl.image("cat.png") + "what?")),
    ],
)
def test_what_a_backend_cannot_do_is_refused_before_a_call(lacking: str, node: Callable[[], Any]) -> None:
    backend = Held()
    backend.can = frozenset(ABILITIES) - {lacking}

    @rl.function
    def program(s: Any) -> None:
        s += node()

    for attempt in (lambda: program.run(backend=backend), lambda: program.trace(backend)):
        with pytest.raises(ProgramError, match=re.escape(f"a held backend cannot do {ABILITIES[lacking]}")) as caught:
            attempt()
        assert caught.value.status == NotServed.status and caught.value.where.startswith(__file__)
    assert not backend.prompts
