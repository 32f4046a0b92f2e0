"""This module owns running any other decoder of `transformers`: its layers, our attention and our KV pool.

Slower than a family of its own (nothing is fused, its Python runs per layer) but correct. The model's attention modules
call an attention function by name; ours is registered under a name of its own and hands q, k, v to the step in
progress, which it finds at the module (not every model passes keyword arguments down that far). Models that do not work
that way are refused at load.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from radixlm.attention.base import LayerSpec, Step
from radixlm.base.errors import StartupError
from radixlm.models.base import Weights
from radixlm.parallel.base import Comm
from radixlm.parallel.local import ALONE

#: Under this name transformers finds our attention.
ATTENTION = "radixlm"
#: Extra inputs that some models give their attention and that no backend of ours takes into account.
UNSUPPORTED = ("s_aux", "position_bias", "sinks", "indices")


def context_length(config: Mapping[str, Any]) -> int:
    length = getattr(_config(config), "max_position_embeddings", None)
    if not isinstance(length, int) or length < 1:
        raise StartupError("config.json has no 'max_position_embeddings'; set the context length yourself")
    return length


def build(
    config: Mapping[str, Any],
    weights: Weights,
    dtype: torch.dtype,
    device: torch.device,
    comm: Comm = ALONE,
    fixed: bool = False,
) -> HfModel:
    if comm.size > 1:
        raise StartupError(
            f"--tensor-parallel-size is {comm.size}, and models that run through transformers, like this one, cannot "
            "be cut into parts: use 1",
            param="tensor_parallel_size",
        )
    if fixed:
        raise StartupError(
            "--deterministic has no products of its own for models that run through transformers, like this one",
            param="deterministic",
        )
    return HfModel(config, weights, dtype, device)


def supports(architecture: str) -> bool:
    """Whether transformers has a decoder of that name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return architecture in _flatten(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())


class HfModel:
    """A causal language model of transformers, run over one flat list of tokens.

    The tokens of all spans form one sequence of a batch of one; positions and attention come from the step, so that
    transformers' masks and caches are not involved.
    """

    def __init__(self, config: Mapping[str, Any], weights: Weights, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION, _attend)
        self._causal = _load(config, weights, dtype, device)
        self._decoder = self._causal.base_model
        self._current = _Current()
        for module in self._decoder.modules():
            if hasattr(module, "layer_idx"):
                module.radixlm = self._current
        head = self._causal.get_output_embeddings()
        self.vocab_size = int(head.weight.shape[0])
        self.hidden_size = int(head.weight.shape[1])
        # What the causal model does after its decoder (head, caps, multipliers) runs on hidden states that are there.
        setattr(self._causal, self._causal.base_model_prefix, _Given())
        self.layers = self._probe(device)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, step: Step) -> torch.Tensor:
        """ids, positions [T] int64 -> hidden states [T, hidden_size] after the last norm."""
        self._current.step = step
        output = self._decoder(input_ids=ids[None], position_ids=positions[None], use_cache=False)
        self._current.step = None
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, hidden_size] -> logits [N, vocab_size]."""
        logits: torch.Tensor = self._causal(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits

    def parameter_count(self) -> int:
        return sum(tensor.numel() for tensor in self._tensors())

    def weight_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors())

    def _probe(self, device: torch.device) -> tuple[LayerSpec, ...]:
        """Run one token and note what each attention layer asks for: exact, whatever the config calls it."""
        name = type(self._causal).__name__
        probe = _Probe()
        token = torch.zeros(1, dtype=torch.int64, device=device)
        try:
            with torch.inference_mode():
                self.head(self.forward(token, token, probe))  # type: ignore[arg-type]
        except StartupError:
            raise
        except Exception as error:  # whatever a foreign model does wrong is a reason not to serve it
            raise StartupError(f"{name} cannot be served: {type(error).__name__}: {error}") from error
        config = self._causal.config.get_text_config()
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        if sorted(probe.specs) != list(range(len(kinds))):
            raise StartupError(
                f"{name} cannot be served: {len(probe.specs)} of its {len(kinds)} layers use the attention interface "
                "of transformers"
            )
        for index, kind in enumerate(kinds):
            # A window that is only in the mask would be lost.
            known = kind == "full_attention" or (kind == "sliding_attention" and probe.specs[index].window)
            if not known:
                raise StartupError(f"{name} cannot be served: layer {index} is of the kind {kind}")
        return tuple(probe.specs[index] for index in range(len(kinds)))

    def _tensors(self) -> list[torch.Tensor]:
        modules = (self._causal, self._decoder)
        return list({id(tensor): tensor for module in modules for tensor in module.parameters()}.values())


class _Probe:
    """Stands in for a step: learns the layers' shapes."""

    def __init__(self) -> None:
        self.specs: dict[int, LayerSpec] = {}


class _Current:
    """Where the model's attention modules find the step in progress."""

    def __init__(self) -> None:
        self.step: Step | _Probe | None = None


class _Given(nn.Module):
    """Stands in for the decoder once its result is known: returns the hidden states it is given."""

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> _Output:
        return _Output(inputs_embeds)


class _Output:
    """A decoder's output of which only the hidden states are there; everything else a head may ask for is None."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int | slice) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function transformers calls: query [1, heads, T, head_dim] -> [1, T, heads, head_dim]."""
    index, current = getattr(module, "layer_idx", None), getattr(module, "radixlm", None)
    if not isinstance(current, _Current) or current.step is None or not isinstance(index, int):
        raise StartupError(f"{type(module).__name__} cannot be served: its layers are not numbered")
    if isinstance(current.step, _Probe):
        current.step.specs[index] = _spec(module, query, key, value, options)
        per_head = query.shape[1] // value.shape[1]
        return value.repeat_interleave(per_head, dim=1).transpose(1, 2), None  # one token attends to itself
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    attended = current.step.attend(index, q, k, v)
    return attended.view(1, len(q), query.shape[1], -1), None


def _spec(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Mapping[str, Any]
) -> LayerSpec:
    """What one layer needs, from the call it makes."""
    name = type(module).__name__
    odd = [option for option in UNSUPPORTED if options.get(option) is not None]
    if odd:
        raise StartupError(f"{name} cannot be served: its attention needs {', '.join(odd)}")
    if value.shape != key.shape or query.shape[-1] != key.shape[-1]:
        raise StartupError(f"{name} cannot be served: its keys and values differ in size")
    if not getattr(module, "is_causal", True):
        raise StartupError(f"{name} cannot be served: its attention is not causal")
    scale = options.get("scaling")
    return LayerSpec(
        heads=query.shape[1],
        kv_heads=key.shape[1],
        head_dim=query.shape[3],
        scale=float(query.shape[3] ** -0.5 if scale is None else scale),
        window=int(options.get("sliding_window") or 0),
        soft_cap=float(options.get("softcap") or 0.0),
    )


def _config(config: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    values = dict(config)
    kind = values.pop("model_type", None)
    if not isinstance(kind, str):
        raise StartupError("config.json has no 'model_type', which transformers needs")
    return AutoConfig.for_model(kind, **values)


def _load(config: Mapping[str, Any], weights: Weights, dtype: torch.dtype, device: torch.device) -> Any:
    """The model with its weights. transformers renames and fuses checkpoint tensors as it does for its own files."""
    from transformers import AutoModelForCausalLM

    parsed = _config(config)
    kind = AutoModelForCausalLM._model_mapping[type(parsed)]
    if not getattr(kind, "_supports_attention_backend", False):
        raise StartupError(f"{kind.__name__} cannot be served: it does not use the attention interface of transformers")
    with torch.device("meta"):
        empty = kind._from_config(parsed, dtype=dtype)
    tied = set(empty._tied_weights_keys or ()) if parsed.get_text_config().tie_word_embeddings else set()
    wanted = {name: tuple(tensor.shape) for name, tensor in empty.state_dict().items()}
    names = weights.names()
    if names and not set(wanted) - tied <= names:
        state = {name: weights.get(name) for name in names}
    else:
        state = {name: weights.get(name, shape) for name, shape in wanted.items() if name not in tied or name in names}
    model, report = kind.from_pretrained(
        None, config=parsed, state_dict=state, dtype=dtype, attn_implementation=ATTENTION, output_loading_info=True
    )
    if report["missing_keys"]:
        raise StartupError(f"the checkpoint lacks {', '.join(sorted(report['missing_keys']))} of {kind.__name__}")
    return model.to(device).eval()


def _flatten(values: Any) -> set[str]:
    found: set[str] = set()
    for value in values:
        found.update(value if isinstance(value, tuple | list) else (value,))
    return found
