"""This module owns the separation of a text into the model's reasoning and its answer."""

from __future__ import annotations

from collections.abc import Mapping

from radixlm.lang.errors import ProgramError

#: Kind of model -> (mark before its reasoning, mark behind it).
MARKS: Mapping[str, tuple[str, str]] = {
    "auto": ("<think>", "</think>"),
    "deepseek-r1": ("<think>", "</think>"),
    "qwen3": ("<think>", "</think>"),
    "glm45": ("<think>", "</think>"),
    "kimi": ("◁think▷", "◁/think▷"),
}


def marks(model_type: str) -> tuple[str, str]:
    if model_type not in MARKS:
        raise ProgramError(f"model_type is {model_type!r}; reasoning is known of {', '.join(MARKS)}")
    return MARKS[model_type]


def split(text: str, model_type: str) -> tuple[str, str]:
    """(reasoning, answer). The first mark may be missing: some templates write it. Without the second one, a text that
    has the first is all reasoning, and any other is all answer.
    """
    begin, end = marks(model_type)
    head, opened, rest = text.partition(begin)
    body = rest if opened and not head.strip() else text
    thought, closed, answer = body.partition(end)
    if closed:
        return thought.strip(), answer.lstrip()
    return (thought.strip(), "") if body is rest and opened else ("", text)
