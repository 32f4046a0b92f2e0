"""Every model family against transformers in float32: tiny random models, the same weights, the same logits.

Pages are shuffled, and sequences reach the model in whole prompts, chunks, single tokens, and mixed steps.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from radixlm.attention.base import AttentionBackend, LayerSpec, Step, StepInputs
from radixlm.attention.cpu import CpuAttention
from radixlm.attention.torch_ref import TorchReference
from radixlm.base.errors import StartupError
from radixlm.memory.pool import KVPool
from radixlm.models import table
from radixlm.models.base import Model
from radixlm.parallel.base import Comm
from radixlm.parallel.local import ALONE
from radixlm.parallel.shares import Cut
from support.ranks import together

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers says of tiny models

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
#: Case -> (model_type of transformers, what its config has besides SIZES).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied, biases": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama, head size": ("llama", {"head_dim": 20, "num_attention_heads": 6, "hidden_act": "gelu"}),
    "llama, one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama 3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
            }
        },
    ),
    "mistral, window": ("mistral", {"sliding_window": 9}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3, biases, windows": (
        "qwen3",
        {
            "head_dim": 16, "attention_bias": True, "use_sliding_window": True, "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "sliding_window": None}),
    "mixtral, window, one expert": (
        "mixtral",
        {"num_local_experts": 5, "num_experts_per_tok": 1, "sliding_window": 9, "head_dim": 20, "hidden_act": "gelu"},
    ),
    "qwen2 mixture": (
        "qwen2_moe",
        {
            "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40, "mlp_only_layers": [2], "use_sliding_window": True,
            "sliding_window": 7, "max_window_layers": 2,
        },
    ),
    "qwen2 mixture, tied": (
        "qwen2_moe",
        {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True,
            "shared_expert_intermediate_size": 16, "qkv_bias": False, "tie_word_embeddings": True,
        },
    ),
    "qwen3 mixture": (
        "qwen3_moe",
        {
            "head_dim": 16, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
    ),
    "qwen3 mixture, some layers dense": (
        "qwen3_moe",
        {
            "num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
            "decoder_sparse_step": 2, "mlp_only_layers": [3], "attention_bias": True, "use_sliding_window": True,
            "sliding_window": 6,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 24, "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "final_logit_softcapping": 20.0,
        },
    ),
    "gemma3, scaled, untied": (
        "gemma3_text",
        {
            "head_dim": 16, "sliding_window": 6, "tie_word_embeddings": False,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
}  # fmt: skip
#: Decoders that run through transformers itself.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox": ("gpt_neox", {}),
    "gpt2": ("gpt2", {}),
    "phi": ("phi", {}),
    "olmo2": ("olmo2", {}),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 6, "attn_logit_softcapping": 3.0}),
    "cohere2": ("cohere2", {"sliding_window": 6, "logit_scale": 0.5}),
    "nemotron": ("nemotron", {}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
}


class Tensors:
    """A checkpoint in memory that checks shapes as a file would."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def get(self, name: str, shape: tuple[int, ...] | None = None, part: Cut | None = None) -> torch.Tensor:
        if name not in self._tensors:
            raise StartupError(f"no tensor {name}")
        tensor = self._tensors[name]
        assert shape is None or tuple(tensor.shape) == shape, (name, tuple(tensor.shape), shape)
        return tensor if part is None else tensor.narrow(part.dim, part.start, part.length).contiguous()


@cache
def reference(kind: str, case: str) -> Any:
    """The model of transformers, with weights large enough for every part to matter."""
    model_type, changes = {**FAMILIES, **OTHERS}[case]
    config = AutoConfig.for_model(model_type, **{**SIZES, **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
            elif "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def checkpoint(model: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """(config.json, tensors) as the model would be saved."""
    from transformers.core_model_loading import revert_weight_conversion

    tensors = revert_weight_conversion(model, model.state_dict())
    if model.config.tie_word_embeddings:
        tensors = {name: tensor for name, tensor in tensors.items() if name not in model._tied_weights_keys}
    return {**model.config.to_dict(), "architectures": [type(model).__name__]}, tensors


def build(model: Any, dtype: torch.dtype = torch.float32, comm: Comm = ALONE) -> Model:
    config, tensors = checkpoint(model)
    return table.find(config).build(config, Tensors(tensors), dtype, CPU, comm)


class Rows:
    """A pool, a page table with shuffled pages, and sequences that grow: what a runner keeps, made by hand."""

    def __init__(self, model: Model, backend: AttentionBackend, page_size: int, rows: int = 4) -> None:
        self._model, self._backend, self._page_size = model, backend, page_size
        pages = rows * (256 // page_size)
        self._pool = KVPool(
            [(layer.kv_heads, layer.head_dim) for layer in model.layers], pages, page_size, torch.float32, CPU
        )
        self._free = list(range(pages))
        random.Random(page_size).shuffle(self._free)
        self._table = torch.zeros(rows, 256 // page_size, dtype=torch.int32)
        self._lengths = [0] * rows
        self._pages = [0] * rows

    @torch.inference_mode()
    def step(self, spans: Sequence[tuple[int, Sequence[int]]]) -> list[torch.Tensor]:
        """Compute tokens of rows: logits [length, vocab] after each of each span."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [self._lengths[row] for row, _ in spans]
        for row, tokens in spans:
            for token in tokens:
                position = self._lengths[row]
                if position == self._pages[row] * self._page_size:
                    self._table[row, self._pages[row]] = self._free.pop()
                    self._pages[row] += 1
                page = int(self._table[row, position // self._page_size])
                ids.append(token)
                positions.append(position)
                slots.append(page * self._page_size + position % self._page_size)
                self._lengths[row] += 1
        lengths = [len(tokens) for _, tokens in spans]
        inputs = StepInputs(
            ids=torch.tensor(ids),
            positions=torch.tensor(positions),
            slots=torch.tensor(slots),
            rows=torch.tensor([row for row, _ in spans]),
            row_ids=[row for row, _ in spans],
            starts=starts,
            lengths=lengths,
            page_table=self._table,
            page_size=self._page_size,
            select=torch.arange(len(ids)),
            decode=all(length == 1 for length in lengths),
        )
        step = Step(inputs, self._model.layers, self._pool, self._backend)
        hidden = self._model.forward(inputs.ids, inputs.positions, step)
        return list(torch.split(self._model.head(hidden[inputs.select]), lengths))


@torch.inference_mode()
def expected(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def draw(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 96), k=count)


def check(model: Any, backend: AttentionBackend, page_size: int, comm: Comm = ALONE) -> None:
    """Four sequences, each reaching the model in its own way, all in the same steps where they can be."""
    ours = build(model, comm=comm)
    rows = Rows(ours, backend, page_size)
    texts = [draw(count, seed) for seed, count in enumerate((40, 23, 37, 12))]
    got: list[list[torch.Tensor]] = [[], [], [], []]

    def step(*spans: tuple[int, int]) -> None:
        """(row, tokens to compute next)."""
        done = [sum(map(len, parts)) for parts in got]
        for (row, _), logits in zip(
            spans, rows.step([(row, texts[row][done[row] : done[row] + count]) for row, count in spans]), strict=True
        ):
            got[row].append(logits)

    step((0, 40))  # a whole prompt
    step((1, 10), (2, 5))  # two prompts, cut
    step((2, 16), (1, 1), (3, 1))  # mixed
    for _ in range(11):
        step((3, 1), (1, 1), (2, 1))  # decode
    step((2, 5), (1, 1))
    for parts, text in zip(got, texts, strict=True):
        assert sum(map(len, parts)) == len(text)
        assert (torch.cat(parts) - expected(model, text)).abs().max() < 1e-4


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("case", FAMILIES)
def test_families_equal_transformers(case: str, page_size: int) -> None:
    check(reference("family", case), CpuAttention(), page_size)


@pytest.mark.parametrize("case", FAMILIES)
def test_families_in_two_parts(case: str) -> None:
    """Each rank gets the whole logits; with one key-value head both hold it."""
    model = reference("family", case)
    together(2, lambda comm: check(model, CpuAttention(), 1, comm))


#: Sizes that are cut unevenly: fewer key-value heads than ranks, a vocabulary that leaves the last ranks less.
UNEVEN: dict[str, tuple[int, dict[str, Any]]] = {
    "three": (3, {"num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 81, "head_dim": 8}),
    "kv heads held twice": (4, {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}),
    "one kv head, six ranks": (6, {"num_key_value_heads": 1, "intermediate_size": 84}),
    "an odd vocabulary": (2, {"vocab_size": 97}),
    "a rank without tokens": (
        12, {"vocab_size": 97, "num_attention_heads": 12, "num_key_value_heads": 3, "intermediate_size": 84}
    ),
}  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("case", UNEVEN)
def test_uneven_parts(case: str, tied: bool) -> None:
    size, changes = UNEVEN[case]
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3", **{**SIZES, "head_dim": 8, **changes, "tie_word_embeddings": tied})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    together(size, lambda comm: check(model, CpuAttention(), 4, comm))


def test_a_number_of_ranks_that_does_not_divide_is_refused() -> None:
    model = reference("family", "llama")  # 6 heads, 2 of keys and values, an inner size of 80
    with pytest.raises(StartupError, match=r"is 3, .* 80, 2 key-value heads; use 2$"):
        together(3, lambda comm: build(model, comm=comm))
    mixture = reference("family", "qwen2 mixture")  # experts of 24, a shared one of 40, a dense layer of 80
    with pytest.raises(StartupError, match=r"a shared expert of 40, .* of 80, 2 key-value heads; use 2$"):
        together(3, lambda comm: build(mixture, comm=comm))
    with pytest.raises(StartupError, match=r"through transformers"):
        together(2, lambda comm: build(reference("other", "olmo2"), comm=comm))


@pytest.mark.parametrize("case", ["llama", "qwen2, windows", "gemma3"])
def test_families_over_the_reference_attention(case: str) -> None:
    check(reference("family", case), TorchReference(), 4)


@pytest.mark.parametrize("case", OTHERS)
def test_any_other_decoder_equals_transformers(case: str) -> None:
    model = reference("other", case)
    config, _ = checkpoint(model)
    assert table.find(config).__name__ == "radixlm.models.hf"  # type: ignore[attr-defined]
    check(model, CpuAttention(), 4)


def bfloat16_errors(case: str) -> tuple[torch.Tensor, torch.Tensor]:
    """How far log probabilities after each token of a text are from float32: ours, and those of transformers."""
    model = reference("family", case)
    text = draw(40)
    exact = expected(model, text).log_softmax(-1)
    config, tensors = checkpoint(model)
    rounded = type(model)(model.config).to(torch.bfloat16).eval()
    rounded.load_state_dict({name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()})
    theirs = expected(rounded, text).float().log_softmax(-1)
    ours = table.find(config).build(config, Tensors(tensors), torch.bfloat16, CPU)
    (logits,) = Rows(ours, CpuAttention(), 1).step([(0, text)])
    ours_off, theirs_off = logits.float().log_softmax(-1) - exact, theirs - exact
    return ours_off.square().mean(-1), theirs_off.square().mean(-1)


@pytest.mark.parametrize("case", ["llama, tied, biases", "qwen3", "gemma3", "olmo2"])
def test_bfloat16_stays_close(case: str) -> None:
    """Rounded weights and activations: as near to float32 as transformers' own bfloat16 is, within a factor of two."""
    ours, theirs = bfloat16_errors(case)
    assert ours.mean().sqrt() < 2 * theirs.mean().sqrt()


@pytest.mark.parametrize("case", ["mixtral", "qwen2 mixture", "qwen3 mixture"])
def test_bfloat16_stays_close_where_it_routes_alike(case: str) -> None:
    """A near-tie between two experts may be decided by rounding, and then a token is another one: most are not."""
    ours, theirs = bfloat16_errors(case)
    assert ours.median().sqrt() < 2 * theirs.median().sqrt()


def test_counts() -> None:
    model = reference("family", "llama, tied, biases")
    ours = build(model)
    assert ours.parameter_count() == sum(parameter.numel() for parameter in model.parameters())
    assert ours.weight_bytes() >= 4 * ours.parameter_count()
    assert (ours.vocab_size, ours.hidden_size, len(ours.layers)) == (96, 48, 3)
    through = build(reference("other", "olmo2"))
    assert through.parameter_count() == sum(p.numel() for p in reference("other", "olmo2").parameters())


def llama() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return checkpoint(reference("family", "llama"))


def logits_of(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    model = table.find(config).build(config, Tensors(tensors), torch.float32, CPU)
    return Rows(model, CpuAttention(), 1).step([(0, draw(20))])[0]


def test_tied_embeddings() -> None:
    """A tied config uses the embedding whether or not the file has a head; an untied one needs the head."""
    config, tensors = llama()
    without = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    tied = {**config, "tie_word_embeddings": True}
    expected_logits = logits_of(tied, without)
    assert torch.equal(expected_logits, logits_of(tied, tensors))
    equal = {**without, "lm_head.weight": without["model.embed_tokens.weight"]}
    assert torch.allclose(expected_logits, logits_of(config, equal), atol=1e-5)
    with pytest.raises(StartupError, match=r"lm_head\.weight"):
        logits_of(config, without)


def test_a_bare_decoder_names_its_tensors_without_prefix() -> None:
    config, tensors = checkpoint(reference("family", "gemma3"))
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    assert torch.equal(logits_of(config, tensors), logits_of({**config, "architectures": ["Gemma3TextModel"]}, bare))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_key_value_heads", 6),
        ("head_dim", 8),
        ("rope_theta", 10_000.0),
        ("rms_norm_eps", 1e-6),
        ("hidden_act", "silu"),
        ("tie_word_embeddings", False),
        ("max_position_embeddings", 2048),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("torch_dtype", "float32"),
        ("bos_token_id", 1),
        ("rope_scaling", None),
    ],
)
def test_a_field_left_out_has_the_documented_default(field: str, value: object) -> None:
    config, tensors = llama()
    config.pop("rope_parameters")
    config.update(num_key_value_heads=6, head_dim=8, rope_theta=10_000.0, max_position_embeddings=2048)
    for name in [name for name in tensors if "k_proj" in name or "v_proj" in name]:
        tensors[name] = tensors[name].repeat(3, 1)
    whole = {**config, field: value}
    left_out = {name: found for name, found in whole.items() if name != field}
    expected_logits = logits_of(whole, tensors)
    assert torch.equal(expected_logits, logits_of(left_out, tensors))
    assert torch.equal(expected_logits, logits_of({**whole, field: None}, tensors))
    family = table.find(whole)
    assert family.context_length(whole) == family.context_length(left_out) == 2048


@pytest.mark.parametrize(
    "field", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
)
def test_a_field_without_a_default_is_named(field: str) -> None:
    config, tensors = llama()
    del config[field]
    with pytest.raises(StartupError, match=f"has no '{field}'"):
        logits_of(config, tensors)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 5, "head_dim": 8}, r"num_attention_heads \(5\) must be a multiple of num_key_value"),
        ({"num_attention_heads": 10, "head_dim": None}, "no multiple of num_attention_heads"),
        ({"head_dim": 9}, "head_dim is 9; it must be even"),
        ({"hidden_size": "48"}, "hidden_size is '48'; it must be a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; it must be true or false"),
        ({"hidden_act": "softplus"}, "activation 'softplus' is not known; known: silu"),
        ({"hidden_act": 3}, "hidden_act is 3; it must be a string"),
        ({"architectures": None}, "has no 'architectures'"),
        ({"architectures": ["LlamaForSpeech"]}, "LlamaForSpeech is not known; known: LlamaForCausalLM, Mistral"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_config_that_cannot_be_right_is_explained(changes: dict[str, Any], message: str) -> None:
    config, tensors = llama()
    with pytest.raises(StartupError, match=message):
        logits_of({**config, **changes}, tensors)


def test_layer_types_must_fit() -> None:
    config, tensors = checkpoint(reference("family", "gemma3"))
    with pytest.raises(StartupError, match="each of the 4 layers; it has 1 entries"):
        logits_of({**config, "layer_types": ["full_attention"]}, tensors)
    with pytest.raises(StartupError, match="names chunked_attention"):
        logits_of({**config, "layer_types": ["chunked_attention"] * 4}, tensors)
    with pytest.raises(StartupError, match="only causal models can generate"):
        logits_of({**config, "use_bidirectional_attention": True}, tensors)


def test_older_spelling_of_gemma_rope() -> None:
    config, tensors = checkpoint(reference("family", "gemma3, scaled, untied"))
    older = {name: value for name, value in config.items() if name not in ("rope_parameters", "layer_types")}
    older.update(
        rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling={"rope_type": "linear", "factor": 8.0},
        sliding_window_pattern=6,
    )  # fmt: skip
    assert torch.equal(logits_of(config, tensors), logits_of(older, tensors))


def test_windows_of_mistral() -> None:
    """Null means none, left out means 4096."""
    from radixlm.models import mistral

    def windows(**changes: object) -> set[int]:
        return {layer.window for layer in mistral.spec({**SIZES, **changes}).attention}

    assert windows() == {4096}
    assert windows(sliding_window=None) == {0}
    assert windows(sliding_window=12) == {12}


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("bloom", "does not use the attention interface of transformers"),
        ("gpt_oss", "its attention needs s_aux"),
        ("minimax", "2 of its 3 layers use the attention interface"),
    ],
)
def test_a_decoder_that_cannot_be_served_is_refused(model_type: str, message: str) -> None:
    config = AutoConfig.for_model(model_type, **{**SIZES, "num_local_experts": 2, "head_dim": 8})
    with pytest.raises(StartupError, match=message):
        build(AutoModelForCausalLM.from_config(config).float())


def test_a_missing_tensor_of_another_decoder_is_named() -> None:
    config, tensors = checkpoint(reference("other", "olmo2"))
    del tensors["model.norm.weight"]
    with pytest.raises(StartupError, match=r"lacks model\.norm\.weight of Olmo2ForCausalLM"):
        logits_of(config, tensors)


def test_specs_of_another_decoder_come_from_its_calls() -> None:
    layers = build(reference("other", "gemma2")).layers
    scale = 256**-0.5
    assert layers[0] == LayerSpec(6, 2, 16, scale, window=6, soft_cap=3.0)
    assert layers[1] == LayerSpec(6, 2, 16, scale, window=0, soft_cap=3.0)
