"""A chat in the terminal: `python examples/chat.py`. An empty line ends it.

Every turn has all turns before it as its prefix, and only what is new is computed.
"""

from __future__ import annotations

from typing import Any

import radixlm as rl


def turn(s: Any, words: str) -> Any:
    """One exchange. `s` is a state that goes on from turn to turn."""
    s += rl.user(words)
    s += rl.assistant(rl.gen("answer", max_tokens=200))
    return s["answer"]


@rl.function
def chat(s: Any, ask: Any, say: Any) -> None:
    s += rl.system("You are a helpful assistant. You answer in one or two sentences.")
    while words := ask():
        say(turn(s, words))
        meta = s.get_meta_info("answer")
        say(f"[{meta['cached_tokens']} of {meta['prompt_tokens']} prompt tokens were cached]")


def main() -> None:
    with rl.Engine(model="smollm2") as engine:
        chat.run(ask=lambda: input("> "), say=print, backend=engine, temperature=0.3)


if __name__ == "__main__":
    main()
