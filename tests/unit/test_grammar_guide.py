"""Guides: reasoning, its budget, and the grammar behind it; forced tokens; the ends of texts."""

from __future__ import annotations

import numpy as np
import pytest

from radixlm.base.errors import Internal
from radixlm.base.request import Grammar, Request, Thinking
from radixlm.base.sampling import SamplingParams
from radixlm.grammar.guide import SequenceGuide
from support.grammars import EOS, compiled, tokenizer, vocabulary

END = (900, 901)


def guide(
    regex: str | None = None, after: tuple[int, ...] = (), budget: int | None = None, **sampling: object
) -> SequenceGuide:
    grammar = Grammar(kind="regex", text=regex, after=after) if regex is not None else None
    request = Request(
        uid=1,
        rid="r",
        tokens=(5,),
        sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
        grammar=grammar,
        thinking=Thinking(budget=budget, end=END) if budget is not None else None,
    )
    return SequenceGuide(request, vocabulary(), compiled("regex", regex).matcher if regex is not None else None)


def ids(mask: np.ndarray | None) -> list[int]:
    assert mask is not None
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little", count=vocabulary().size)).tolist()


def encode(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_a_budget_is_honoured_to_the_token(budget: int) -> None:
    steered = guide(budget=budget)
    for spent in range(budget):
        assert steered.slack == budget - spent and not steered.forced() and steered.mask() is None
        steered.take(50 + spent)
    assert list(steered.forced()) == list(END) and steered.slack == 0
    assert ids(steered.mask()) == [END[0]]
    for token in END:
        steered.take(token)
    assert not steered.forced() and steered.mask() is None and not steered.done
    assert steered.slack > 1 << 20


def test_reasoning_that_ends_by_itself_is_not_ended_again() -> None:
    steered = guide(budget=5)
    for token in (50, *END, 51, 52, 53, 54, 55):
        assert not steered.forced()
        steered.take(token)


def test_half_an_end_is_completed() -> None:
    steered = guide(budget=3)
    for token in (50, 51, END[0]):
        steered.take(token)
    assert list(steered.forced()) == [END[1]]


def test_a_grammar_starts_behind_the_reasoning() -> None:
    steered = guide("ab", after=(900,))
    for token in (50, 51):
        mask = ids(steered.mask())
        assert len(mask) == vocabulary().size - len(EOS) and not set(mask) & set(EOS)
        assert steered.slack == 0
        steered.take(token)
    steered.take(900)
    assert tokenizer().decode(steered.forced()) == "ab"
    for token in list(steered.forced()):
        steered.take(token)
    assert steered.done


def test_a_budget_and_a_grammar_together() -> None:
    steered = guide("[xy]z", after=(900, 901), budget=2)
    for token in (50, 51, *END):
        assert not steered.done
        steered.take(token)
    assert not steered.forced()
    assert {tokenizer().decode([token]) for token in ids(steered.mask())} <= {"x", "y", "xz", "yz"}
    for token in encode("xz"):
        steered.take(token)
    assert steered.done


def test_a_grammar_without_a_mark_starts_when_the_budget_is_spent() -> None:
    steered = guide("ab", budget=1)
    assert not steered.forced()
    for token in (50, *END):
        steered.take(token)
    assert tokenizer().decode(steered.forced()) == "ab"


def test_ends_are_hidden_from_those_who_ignore_them() -> None:
    for ignore in (False, True):
        steered = guide("a{1,4}", ignore_eos=ignore)
        steered.take(encode("a")[0])
        assert bool(set(ids(steered.mask())) & set(EOS)) is not ignore


def test_a_forced_token_is_the_only_one_allowed() -> None:
    steered = guide("one, two, three, four, five[ab]")
    said = []
    while steered.forced():
        token = steered.forced()[0]
        assert ids(steered.mask()) == [token]
        steered.take(token)
        said.append(token)
    assert said == encode("one, two, three, four, five")[: len(said)] and len(said) >= 7


def test_a_token_that_is_not_allowed_is_found_out() -> None:
    with pytest.raises(Internal):
        guide("ab[cd]").take(encode("x")[0])
    with pytest.raises(Internal):
        guide("[cd]x").take(encode("z")[0])


def test_matchers_go_back_and_fork() -> None:
    matcher = compiled("regex", "[ab]{3}").matcher()
    a, b = encode("a")[0], encode("b")[0]
    assert matcher.accept(a) and matcher.accept(a)
    other = matcher.fork()
    assert other.accept(b) and other.done and not matcher.done
    matcher.rollback(2)
    assert matcher.accept(b) and matcher.accept(b) and matcher.accept(b) and matcher.done
