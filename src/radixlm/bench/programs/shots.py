"""This module owns the workloads whose runs share examples: MMLU, HellaSwag and GSM8K by their structure."""

from __future__ import annotations

from typing import Any

from radixlm.bench.programs.workload import Size, Words, Workload
from radixlm.lang import function, gen, select


@function
def multiple_choice(s: Any, examples: str, question: str) -> None:
    s += examples + question + "\nAnswer:" + gen("answer", max_tokens=1)


@function
def ending(s: Any, examples: str, begin: str, endings: list[str]) -> None:
    s += examples + begin + select("ending", endings)


@function
def arithmetic(s: Any, examples: str, question: str) -> None:
    s += examples + "Question: " + question + "\nAnswer:" + gen("answer", max_tokens=24)


def mmlu(words: Words, size: Size) -> Workload:
    """Five examples of a subject, then a question with four answers; one token out."""

    def question() -> str:
        answers = "".join(f"\n{letter}. {text}" for letter, text in zip("ABCD", words.texts(4, 6), strict=True))
        return f"{words.text(40)}?{answers}"

    items = []
    for _ in range(size.count(4)):
        head = f"The following are multiple choice questions about {words.text(4)}.\n\n"
        shots = head + "".join(f"{question()}\nAnswer: {words.random.choice('ABCD')}\n\n" for _ in range(5))
        items += [{"examples": shots, "question": question()} for _ in range(10)]
    words.random.shuffle(items)
    return Workload("mmlu", "MMLU, 5-shot: one token after a question; examples by subject", multiple_choice, items)


def hellaswag(words: Words, size: Size) -> Workload:
    """Twenty examples, then the likeliest of four endings."""
    shots = "".join(f"{text}\n\n" for text in words.texts(20, 40))
    items = [
        {"examples": shots, "begin": words.text(24), "endings": [f" {text}" for text in words.texts(4, 14)]}
        for _ in range(size.count(16))
    ]
    return Workload("hellaswag", "HellaSwag, 20-shot: select of four endings", ending, items)


def gsm8k(words: Words, size: Size) -> Workload:
    shots = "".join(f"Question: {words.text(40)}?\nAnswer: {words.text(50)}\n\n" for _ in range(5))
    items = [{"examples": shots, "question": f"{words.text(40)}?"} for _ in range(size.count(24))]
    return Workload("gsm8k", "GSM8K, 5-shot: an answer of some sentences", arithmetic, items)
