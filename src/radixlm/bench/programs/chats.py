"""This module owns the workloads of chats. That with long answers is the control: most of its time is decoding, which
no cache makes shorter.
"""

from __future__ import annotations

from typing import Any

from radixlm.bench.programs.workload import Size, Words, Workload
from radixlm.lang import function, gen

TURNS = 4


@function
def turns(s: Any, head: str, questions: list[str], answer: int) -> None:
    s += head
    for i, question in enumerate(questions):
        s += "\nUser: " + question + "\nAssistant:" + gen(f"answer{i}", max_tokens=answer)


def _chats(name: str, about: str, words: Words, size: Size, answer: int) -> Workload:
    items = [
        {"head": f"Chat {i}.", "questions": words.texts(TURNS, 90), "answer": answer} for i in range(size.count(8))
    ]
    return Workload(name, about, turns, items)


def short(words: Words, size: Size) -> Workload:
    return _chats("chat-short", f"chats of {TURNS} turns with short answers", words, size, 6)


def long(words: Words, size: Size) -> Workload:
    return _chats("chat-long", f"chats of {TURNS} turns with long answers (control)", words, size, 72)
