"""This module owns which workloads there are and which variants of the system each is run on."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from radixlm.bench.programs import agents, branches, chats, documents, shots
from radixlm.bench.programs.workload import Make
from radixlm.lang.backends.base import Scheduling

WORKLOADS: Final[Mapping[str, Make]] = types.MappingProxyType(
    {
        "mmlu": shots.mmlu,
        "hellaswag": shots.hellaswag,
        "gsm8k": shots.gsm8k,
        "react": agents.react_agents,
        "generative-agents": agents.generative_agents,
        "tree-of-thought": branches.tree,
        "skeleton-of-thought": branches.skeleton,
        "judge": branches.llm_judge,
        "json": documents.json_decoding,
        "rag": documents.rag,
        "multi-document": documents.several_documents,
        "chat-short": chats.short,
        "chat-long": chats.long,
    }
)


@dataclass(frozen=True, slots=True)
class Variant:
    """The system, or the system without one of its parts.

    Attributes:
        options: of the engine.
        scheduling: how the programs' calls are sent.
    """

    about: str
    options: Mapping[str, Any] = field(default_factory=dict)
    scheduling: Scheduling = field(default_factory=Scheduling)


#: By name, the whole system first. "default": what an engine does when nobody says anything.
VARIANTS: Final[Mapping[str, Variant]] = types.MappingProxyType(
    {
        "full": Variant("everything, longest prefix first", {"schedule_policy": "lpm"}),
        "no-cache": Variant(
            "every call computes its whole prompt", {"disable_radix_cache": True}, Scheduling(hints=False)
        ),
        "no-tree": Variant(
            "a program finds its own prefixes alone", {"schedule_policy": "lpm"}, Scheduling(hints=False, apart=True)
        ),
        "fcfs": Variant("first come, first served (the default order)", {"schedule_policy": "fcfs"}),
        "random": Variant("calls in random order", {"schedule_policy": "random"}),
        "no-parallelism": Variant(
            "one call of a program at a time", {"schedule_policy": "lpm"}, Scheduling(parallel=False)
        ),
        "no-hint": Variant("shared prefixes are not sent ahead", {"schedule_policy": "lpm"}, Scheduling(hints=False)),
    }
)
