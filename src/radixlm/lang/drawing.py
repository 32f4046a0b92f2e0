"""This module owns the pictures of a graph: lines of text, and an SVG with a column for each state.

Colours say who shares a text: every run, the states of a fork, or nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from radixlm.lang.graph import Fork, Graph, Join, Node, SetVar
from radixlm.lang.ir import (
    Argument,
    Gen,
    Image,
    Reasoning,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    Select,
    Text,
    Variable,
)

WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN = 210, 28, 34, 14, 16
COLOURS: Mapping[str, tuple[str, str]] = {
    "run": ("#cfe8cf", "shared by every run"),
    "fork": ("#d3e0f5", "shared by the states of a fork"),
    "none": ("#f4f1ea", "of one run and one state"),
}
CALL = "#f7d9b0"


def label(op: Any) -> str:
    """A node in a few words."""
    if isinstance(op, Text):
        return f'"{_short(op.text)}"'
    if isinstance(op, Gen):
        return f"gen {op.name}".rstrip()
    if isinstance(op, Select):
        return f"select {op.name} of {len(op.choices)}".replace("  ", " ")
    if isinstance(op, Argument | Variable):
        return f"{{{op.name}}}"
    if isinstance(op, RoleBegin):
        return f"{op.role} ["
    if isinstance(op, RoleEnd):
        return f"] {op.role}"
    if isinstance(op, ScopeBegin | ScopeEnd):
        return f"{'begin' if isinstance(op, ScopeBegin) else 'end'} of {op.name}"
    if isinstance(op, Fork):
        return f"fork into {len(op.streams)}"
    if isinstance(op, Join):
        return f"join {len(op.streams)} ({'append' if op.append else 'gather'})"
    if isinstance(op, SetVar):
        return f"{op.name} = ..."
    if isinstance(op, Image):
        return f"image {_short(op.source)}"
    return "separate reasoning" if isinstance(op, Reasoning) else type(op).__name__


def _short(text: str, most: int = 22) -> str:
    flat = " ".join(text.split()) or text.encode("unicode_escape").decode()
    return flat if len(flat) <= most else f"{flat[: most - 3]}..."


def lines(graph: Graph) -> str:
    """A line for each node: number, state, what it is, what it waits for besides the one before it in its state, and
    who shares it.
    """
    sharing = graph.sharing()
    last: dict[int, int] = {}
    rows = [f"{graph.title}: {len(graph.nodes)} nodes, {len(graph.calls())} calls, {graph.streams} states"]
    for node in graph.nodes:
        others = [str(number) for number in node.waits if number != last.get(node.stream)]
        last[node.stream] = node.number
        waits = f"  after {', '.join(others)}" if others else ""
        shared = {"run": "  (every run)", "fork": "  (every state of the fork)"}.get(sharing[node.number], "")
        rows.append(f"{node.number:4}  state {node.stream}  {label(node.op)}{waits}{shared}")
    return "\n".join(rows)


def svg(graph: Graph) -> str:
    """A picture of its own, without scripts or fonts to load. Time goes down; a node is below all it waits for."""
    rows = _rows(graph)
    places = {
        node.number: (MARGIN + node.stream * (WIDTH + GAP_X), MARGIN + 40 + rows[node.number] * (HEIGHT + GAP_Y))
        for node in graph.nodes
    }
    sharing = graph.sharing()
    width = 2 * MARGIN + graph.streams * (WIDTH + GAP_X) - GAP_X
    height = MARGIN + 40 + (max(rows.values(), default=0) + 1) * (HEIGHT + GAP_Y) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{max(width, 640)}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<text x="{MARGIN}" y="{MARGIN + 14}" font-size="15">{escape(graph.title)}</text>',
        *(_arrow(places[before], places[node.number]) for node in graph.nodes for before in node.waits),
        *(_box(node, places[node.number], sharing[node.number]) for node in graph.nodes),
        *_legend(height),
        "</svg>",
    ]
    return "\n".join(parts)


def _rows(graph: Graph) -> dict[int, int]:
    """How far down each node is."""
    rows: dict[int, int] = {}
    for node in graph.nodes:
        rows[node.number] = 1 + max((rows[before] for before in node.waits), default=-1)
    return rows


def _box(node: Node, place: tuple[int, int], shared: str) -> str:
    x, y = place
    call = isinstance(node.op, Gen | Select | Reasoning)
    colour = CALL if call else COLOURS[shared][0]
    return (
        f'<g><title>{escape(node.where)}</title><rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="5" '
        f'fill="{colour}" stroke="#888"/><text x="{x + 8}" y="{y + 18}">{escape(label(node.op))}</text></g>'
    )


def _arrow(start: tuple[int, int], end: tuple[int, int]) -> str:
    (x1, y1), (x2, y2) = start, end
    x1, x2, y1 = x1 + WIDTH // 2, x2 + WIDTH // 2, y1 + HEIGHT
    return f'<path d="M{x1},{y1} C{x1},{y1 + 12} {x2},{y2 - 12} {x2},{y2}" fill="none" stroke="#888"/>'


def _legend(height: int) -> list[str]:
    parts, x = [], MARGIN
    for colour, text in (*COLOURS.values(), (CALL, "a call of the model")):
        parts.append(f'<rect x="{x}" y="{height - 26}" width="14" height="14" fill="{colour}" stroke="#888"/>')
        parts.append(f'<text x="{x + 20}" y="{height - 14}">{text}</text>')
        x += 34 + 7 * len(text)
    return parts
