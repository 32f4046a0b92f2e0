"""Small Llama checkpoints made on the spot: with random weights, and with weights that make a model echo its prompt."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from support.models import packaged

Array = npt.NDArray[np.float32]
Weights = dict[str, Array]
Json = dict[str, Any]

#: Tokens after which `repeater` says its prompt again.
PERIOD = 64

#: The repeater's chat: the user's words, the end token, and filler that makes a whole period.
REPEATER_TEMPLATE = "{{ messages[0].content }}{{ eos_token }}{{ ' x' * (filler | default(0)) }}"


def config(**changes: Any) -> Json:
    """`config.json` of a two-layer Llama with the default model's vocabulary. A value of None leaves a field out."""
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {name: value for name, value in {**fields, **changes}.items() if value is not None}


def random_weights(shape: Json, seed: int = 0) -> Weights:
    """Weights for `config()`'s fields. Matrices are large enough that each token depends on all before it."""
    random = np.random.default_rng(seed)
    hidden, inner, vocab = shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"]
    queries = shape["num_attention_heads"] * shape["head_dim"]
    keys = shape["num_key_value_heads"] * shape["head_dim"]

    def matrix(rows: int, columns: int) -> Array:
        return random.standard_normal((rows, columns), np.float32) * np.float32(1.5 / np.sqrt(columns))

    weights = {"model.norm.weight": np.ones(hidden, np.float32)}
    for layer in range(shape["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        weights |= {
            f"{at}input_layernorm.weight": np.ones(hidden, np.float32),
            f"{at}post_attention_layernorm.weight": np.ones(hidden, np.float32),
            f"{at}self_attn.q_proj.weight": matrix(queries, hidden),
            f"{at}self_attn.k_proj.weight": matrix(keys, hidden),
            f"{at}self_attn.v_proj.weight": matrix(keys, hidden),
            f"{at}self_attn.o_proj.weight": matrix(hidden, queries),
            f"{at}mlp.gate_proj.weight": matrix(inner, hidden),
            f"{at}mlp.up_proj.weight": matrix(inner, hidden),
            f"{at}mlp.down_proj.weight": matrix(hidden, inner),
        }
    weights["model.embed_tokens.weight"] = random.standard_normal((vocab, hidden), np.float32)
    if not shape.get("tie_word_embeddings"):
        weights["lm_head.weight"] = random.standard_normal((vocab, hidden), np.float32) * np.float32(0.5)
    return weights


def repeater_weights(shape: Json) -> Weights:
    """One attention layer that copies the token `PERIOD - 1` places back: the next token is the one a period ago.

    Every embedding is a row of signs whose first is +1. That constant makes queries and keys that know only their
    position; rotation turns their product into a peak at one distance. Values carry the token's signs to the output.
    """
    hidden, heads, dim = shape["hidden_size"], shape["num_attention_heads"], shape["head_dim"]
    assert heads * dim == hidden == shape["num_key_value_heads"] * dim and shape["num_hidden_layers"] == 1
    signs = np.random.default_rng(0).choice(np.array([-1, 1], np.float32), (shape["vocab_size"], hidden))
    signs[:, 0] = 1
    half = dim // 2
    turn = (PERIOD - 1) * shape["rope_theta"] ** (-np.arange(half) / half)
    query, key = np.zeros((heads, dim, hidden), np.float32), np.zeros((heads, dim, hidden), np.float32)
    sharpness = 400.0
    query[:, :half, 0], query[:, half:, 0] = sharpness * np.cos(turn), -sharpness * np.sin(turn)
    key[:, :half, 0] = 1
    inner = shape["intermediate_size"]
    at = "model.layers.0."
    return {
        "model.embed_tokens.weight": signs,
        "model.norm.weight": np.ones(hidden, np.float32),
        f"{at}input_layernorm.weight": np.ones(hidden, np.float32),
        f"{at}post_attention_layernorm.weight": np.ones(hidden, np.float32),
        f"{at}self_attn.q_proj.weight": query.reshape(hidden, hidden),
        f"{at}self_attn.k_proj.weight": key.reshape(hidden, hidden),
        f"{at}self_attn.v_proj.weight": np.eye(hidden, dtype=np.float32),
        f"{at}self_attn.o_proj.weight": 8 * np.eye(hidden, dtype=np.float32),
        f"{at}mlp.gate_proj.weight": np.zeros((inner, hidden), np.float32),
        f"{at}mlp.up_proj.weight": np.zeros((inner, hidden), np.float32),
        f"{at}mlp.down_proj.weight": np.zeros((hidden, inner), np.float32),
    }


def write(
    path: Path,
    shape: Json,
    weights: Mapping[str, Array] | None,
    *,
    chat_template: str | None = None,
    generation_config: Json | None = None,
    tokenizer: Callable[[Path], None] | None = None,
) -> Path:
    """A model directory in Hugging Face layout.

    Args:
        chat_template: instead of the default model's.
        tokenizer: writes another tokenizer than the default model's into the directory.
    """
    path.mkdir(parents=True)
    _write_json(path / "config.json", shape)
    if weights is not None:
        save_file(dict(weights), path / "model.safetensors", {"format": "pt"})
    if generation_config is not None:
        _write_json(path / "generation_config.json", generation_config)
    if tokenizer is not None:
        tokenizer(path)
        return path
    source = packaged()
    assert source.tokenizer_file is not None
    shutil.copy(source.tokenizer_file, path / "tokenizer.json")
    names = dict(source.tokenizer_config)
    if chat_template is not None:
        names["chat_template"] = chat_template
    _write_json(path / "tokenizer_config.json", names)
    return path


def random_model(path: Path, **changes: Any) -> Path:
    """A random model with the default model's tokenizer and chat template."""
    shape = config(**changes)
    return write(path, shape, random_weights(shape))


def repeater(path: Path) -> Path:
    """A model that says its last `PERIOD` tokens again and again, whatever they are: any text can be had from it."""
    shape = config(
        hidden_size=128, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=64,
        tie_word_embeddings=True,
    )  # fmt: skip
    return write(path, shape, repeater_weights(shape), chat_template=REPEATER_TEMPLATE)


#: The thinker's: the reasoning is opened unless it is not wanted.
THINKER_TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
{% if enable_thinking is not defined or enable_thinking %}<think>
{% endif %}"""


def thinker(path: Path) -> Path:
    """A random model whose template has it reason."""
    shape = config()
    return write(path, shape, random_weights(shape, seed=5), chat_template=THINKER_TEMPLATE)


#: The odd model's: `odd` says what is odd about it.
ODD_TEMPLATE = """{% if messages[0].role == 'system' %}{{ raise_exception('I know no system role, sorry') }}{% endif %}
{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<no thinking>
{% endif %}"""

#: Rows of the odd model's output past its tokenizer, and the token that its weights are broken for.
PADDING, BROKEN = 64, 200


def odd(path: Path) -> Path:
    """A random model with every oddity that a checkpoint may have.

    Its output is `PADDING` rows wider than its tokenizer, with weights that would make them win; the embedding of token
    `BROKEN` is not a number; its template refuses a role and reads an argument; its generation_config is almost greedy.
    """
    shape = config(vocab_size=49152 + PADDING)
    weights = random_weights(shape, seed=3)
    weights["lm_head.weight"][-PADDING:] *= 50
    weights["model.embed_tokens.weight"][BROKEN] = np.nan
    generation = {"temperature": 0.01, "top_k": 1, "top_p": 0.9, "do_sample": True, "eos_token_id": 2}
    return write(path, shape, weights, chat_template=ODD_TEMPLATE, generation_config=generation)


def _write_json(path: Path, content: Json) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
