"""Dense checkpoints made into mixtures of experts that must say the same: every expert is the dense feed-forward part.

The weights of a token's experts sum to 1: whatever the router chooses, which is random, the sum is the dense result.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from support import tiny

Tensors = Mapping[str, torch.Tensor]

#: Dense architecture -> the mixtures that have its attention.
FAMILIES = {
    "LlamaForCausalLM": ("MixtralForCausalLM", "Qwen2MoeForCausalLM"),
    "Qwen3ForCausalLM": ("Qwen3MoeForCausalLM",),
}


def upcycled(
    config: Mapping[str, Any], weights: Tensors, architecture: str, experts: int, active: int
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """config.json and tensors of the mixture. Qwen2's has a shared expert as well, which adds nothing."""
    assert architecture in FAMILIES[config["architectures"][0]]
    generator = torch.Generator().manual_seed(experts)
    mixtral, shared = architecture == "MixtralForCausalLM", architecture == "Qwen2MoeForCausalLM"
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    made = {
        **config,
        "architectures": [architecture],
        "model_type": {"Mixtral": "mixtral", "Qwen2Moe": "qwen2_moe", "Qwen3Moe": "qwen3_moe"}[architecture[:-11]],
        "num_experts_per_tok": active,
        "num_local_experts" if mixtral else "num_experts": experts,
    }
    if not mixtral:
        made |= {"moe_intermediate_size": inner, "norm_topk_prob": True, "qkv_bias": False}
    block = "block_sparse_moe" if mixtral else "mlp"
    parts = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"} if mixtral else {}
    tensors = {name: tensor for name, tensor in weights.items() if ".mlp." not in name}

    def draw(*shape: int) -> torch.Tensor:
        dtype = next(iter(weights.values())).dtype
        return (torch.randn(*shape, generator=generator) * 3 / hidden**0.5).to(dtype)

    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        tensors[f"{at}{block}.gate.weight"] = draw(experts, hidden)
        for part in ("gate_proj", "up_proj", "down_proj"):
            dense = weights[f"{at}mlp.{part}.weight"]
            for expert in range(experts):
                tensors[f"{at}{block}.experts.{expert}.{parts.get(part, part)}.weight"] = dense.clone()
        if shared:
            made["shared_expert_intermediate_size"] = 4
            tensors[f"{at}mlp.shared_expert_gate.weight"] = draw(1, hidden)
            tensors[f"{at}mlp.shared_expert.gate_proj.weight"] = draw(4, hidden)
            tensors[f"{at}mlp.shared_expert.up_proj.weight"] = draw(4, hidden)
            tensors[f"{at}mlp.shared_expert.down_proj.weight"] = torch.zeros_like(draw(hidden, 4))
    return made, tensors


def write(path: Path, config: Mapping[str, Any], weights: Tensors) -> Path:
    """A model directory with the default model's tokenizer."""
    tiny.write(path, dict(config), None)
    save_file(dict(weights), path / "model.safetensors", {"format": "pt"})
    return path
