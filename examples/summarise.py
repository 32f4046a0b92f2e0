"""A long text in parts at once, then a summary of the summaries: `python examples/summarise.py FILE`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import radixlm as rl

PART = 2000  # characters


def parts(text: str) -> list[str]:
    """The text cut at ends of paragraphs, near every `PART` characters."""
    found: list[str] = [""]
    for paragraph in text.split("\n\n"):
        if len(found[-1]) + len(paragraph) > PART and found[-1]:
            found.append("")
        found[-1] += paragraph + "\n\n"
    return [part.strip() for part in found if part.strip()]


@rl.function
def summarise(s: Any, text: str) -> Any:
    s += rl.system("You summarise texts faithfully, in plain words.")
    pieces = s.fork(len(parts(text)))
    for piece, part in zip(pieces, parts(text), strict=True):
        piece += rl.user(f"Summarise in one sentence:\n{part}") + rl.assistant(rl.gen("summary", max_tokens=60))
    pieces.join()
    s += rl.user("Make one short summary of these:\n" + "\n".join(s["summary"]))
    s += rl.assistant(rl.gen("whole", max_tokens=120))
    return s["whole"]


if __name__ == "__main__":
    source = Path(sys.argv[1] if len(sys.argv) > 1 else __file__).read_text()
    with rl.Engine(model="smollm2") as engine:
        print(summarise.run(source, backend=engine, temperature=0).ret_value)
