"""This module owns `radixlm demo`: two questions about one document, and what the second saves by sharing a prefix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from radixlm.cli import asking
from radixlm.cli.screen import Screen
from radixlm.cli.settings import settle
from radixlm.cli.talk import INTERRUPTED, Local, Message, Talker, Turn, ask
from radixlm.config import cli

DOCUMENT: Final = """\
You answer questions about the lighthouse of Gull Point, in one or two short sentences, from this guide for visitors.

History. The lighthouse of Gull Point was built in 1871, after the steamer Margaret Lee ran onto the reef in a winter
storm. Its builder was the engineer Anna Holm. The granite came from the quarry at Stony Bay, twelve miles to the
north, and was carried over the ice by horse sleigh. Until 1934 the lamp burned oil; then it was changed to electric
light. The last keeper, Thomas Reed, retired in 1988, and since then the light has worked by itself. In 2003 the
village bought the buildings for one dollar and opened a museum in them.

The tower. The tower is 42 meters high and has 197 steps. It is painted in three broad bands: white at the bottom, red
in the middle, and white at the top. Visitors may climb it in groups of at most eight. There is no lift. Children
under six may not climb the tower, because the last ladder is steep. From the gallery one can see the reef, the harbor
of Stony Bay and, on clear days, the mountains of the mainland. The light flashes twice every fifteen seconds and can
be seen from 24 miles away.

The museum. The keeper's house holds the museum. On the ground floor there is the old kitchen with its iron stove, and
the radio room. Upstairs there are models of eleven ships that were lost on the reef, and the bell of the Margaret
Lee, which a fisherman found in his net in 1956. The oil store next to the house is now a small shop that sells
postcards, honey and woolen hats.

Visiting. The museum is open from May to September, every day except Monday, from ten in the morning to five in the
afternoon. A ticket costs nine dollars for adults and four dollars for children. Dogs are welcome in the garden but
not in the buildings. The ferry from Stony Bay leaves every hour and takes twenty-five minutes. There is no parking at
Gull Point: leave your car at the harbor. The cafe by the landing serves fish soup, bread and coffee until four
o'clock. On the first Saturday of August the village holds the Night of the Lamp, when the old oil lamp is lit once
more and a choir sings on the rocks below the tower.

Safety. The rocks are slippery when wet. Stay behind the yellow line when the foghorn sounds: it is very loud. In a
storm the ferry does not run, and the museum closes two hours before the last boat. In an emergency, ask any member of
the staff, who wear blue jackets, or ring the bell at the landing three times."""

QUESTIONS: Final = ("In which year was the lighthouse built?", "How many steps does the tower have?")

#: Greedy, so that every run says the same; short, since it is the prompt that this is about.
SAMPLING: Final[dict[str, Any]] = {"temperature": 0.0, "max_new_tokens": 64}


def parser() -> cli.Parser:
    made = cli.Parser(
        "radixlm demo",
        "Ask two questions about one built-in document, and show what the second saves because the KV cache of the "
        "document is already in the tree. Every engine option of `radixlm serve` is accepted.",
        "radixlm demo [MODEL] [options]",
    )
    made.add_argument("argument", metavar="MODEL", nargs="?", help="the same as --model MODEL")
    cli.add_options(made, owners=cli.ENGINE, shown=("model", "device"))
    return made


def main(argv: Sequence[str]) -> int:
    said = parser().parse(argv)
    resolved = settle(said, said.argument, asking.QUIET)
    if resolved is None:
        return 0
    from radixlm.llm import Engine

    screen = Screen()
    with screen.busy(f"loading {resolved.config.model.model}"):
        engine = Engine(resolved.config)
    with engine:
        facts = engine.facts
        screen.line(f"{facts.model.name} on {facts.device.name}, {facts.model.dtype}", "bold")
        # The first step of a process allocates and tunes. Counted with the first question, it would flatter the second.
        talker = Local(engine)
        ask(talker, "Warm up.", {"temperature": 0.0, "max_new_tokens": 2}, lambda text: None)
        turns = [_turn(talker, screen, question) for question in QUESTIONS]
    if any(turn.finish == INTERRUPTED for turn in turns):
        return 130
    screen.line()
    screen.table("what the tree saved", savings(*turns))
    return 0


def savings(cold: Turn, warm: Turn) -> list[tuple[str, str, str, str]]:
    """Rows of the closing table: name, first question, second question, what that means."""
    computed = [turn.prompt_tokens - turn.cached_tokens for turn in (cold, warm)]
    ratio = cold.first / warm.first if warm.first else 0.0
    return [
        ("", "first", "second", ""),
        ("prompt tokens", str(cold.prompt_tokens), str(warm.prompt_tokens), ""),
        (
            "found in the tree",
            str(cold.cached_tokens),
            str(warm.cached_tokens),
            f"{warm.share:.0%} of the second prompt",
        ),
        ("computed", str(computed[0]), str(computed[1]), ""),
        ("first token after", f"{cold.first:.3f} s", f"{warm.first:.3f} s", f"{ratio:.1f} times sooner"),
    ]


def _turn(talker: Talker, screen: Screen, question: str) -> Turn:
    messages: list[Message] = [{"role": "system", "content": DOCUMENT}, {"role": "user", "content": question}]
    screen.line()
    screen.line(f"Q: {question}", "bold")
    turn = ask(talker, messages, SAMPLING, screen.write)
    screen.line()
    screen.line(f"[{turn}]", "dim")
    return turn
