"""This module owns `radixlm run`: one prompt, its answer streamed to standard output."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from radixlm.base.errors import StartupError
from radixlm.cli import asking
from radixlm.cli.screen import Screen
from radixlm.cli.settings import settle
from radixlm.cli.talk import INTERRUPTED, Message, Prompt, ask
from radixlm.config import cli


def parser() -> cli.Parser:
    made = cli.Parser(
        "radixlm run",
        "Answer one prompt. The answer goes to standard output, figures to standard error. Without a prompt, or with "
        "`-` for it, the prompt is read from standard input. Every engine option of `radixlm serve` is accepted.",
        "radixlm run [MODEL] PROMPT [options]",
    )
    made.add_argument("words", metavar="[MODEL] PROMPT", nargs="*", help="the prompt, after the model if one is named")
    made.add_argument("--raw", action="store_true", help="continue the prompt as it stands, without a chat template")
    made.add_argument("--stats", action="store_true", help="print figures even if standard error is not a terminal")
    asking.add_asking(made)
    return made


def main(argv: Sequence[str]) -> int:
    said = parser().parse(argv)
    if len(said.words) > 2:
        raise StartupError(f"{len(said.words)} arguments are given; put the prompt in quotes")
    model, text = (said.words[0], said.words[1]) if len(said.words) == 2 else (None, "".join(said.words))
    resolved = settle(said, model, asking.QUIET)
    if resolved is None:
        return 0
    sampling = asking.sampling(said)
    asking.check_sampling(sampling)
    prompt = _prompt(text, said.system, said.raw)
    screen = Screen()
    talker = asking.talker(said, resolved, screen)
    try:
        turn = ask(talker, prompt, sampling, screen.write, screen.think)
    finally:
        talker.close()
    if not turn.text.endswith("\n"):
        screen.write("\n")
    if said.stats or sys.stderr.isatty():
        screen.warn(f"[{turn}]")
    return 130 if turn.finish == INTERRUPTED else 0


def _prompt(text: str, system: str | None, raw: bool) -> Prompt:
    if text in ("", "-"):
        if sys.stdin.isatty() and not text:
            raise StartupError('no prompt; say radixlm run "your question", or radixlm chat to talk')
        text = sys.stdin.read().strip()
    if not text:
        raise StartupError("the prompt is empty")
    if raw:
        if system:
            raise StartupError("--system needs the chat template that --raw leaves out; use one of them")
        return text
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    return [*messages, {"role": "user", "content": text}]
