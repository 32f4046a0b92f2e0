"""This module owns what a process loads of a model without torch: its tokenizer, its chat template, its defaults."""

from __future__ import annotations

from collections.abc import Callable

from radixlm.api.service import Served, sampling_defaults
from radixlm.checkpoint.checkpoint import Checkpoint
from radixlm.checkpoint.locate import locate
from radixlm.config.schema import Config
from radixlm.text.parsers.choose import choose
from radixlm.text.template import load_template
from radixlm.text.tokenizer import Tokenizer

Report = Callable[[str, float], None]


def load_served(config: Config, report: Report) -> Served:
    """The model as the api process knows it. Fetches and converts the model first if that was never done.

    Raises:
        StartupError: there is no such model, it has no tokenizer, or there is no parser of the name that is configured.
    """
    checkpoint = find(config, report)
    tokenizer = Tokenizer.of(checkpoint)
    defaults = sampling_defaults(checkpoint.generation_config) if config.model.sampling_defaults == "model" else {}
    template = load_template(
        checkpoint, tokenizer.control_words, config.model.chat_template, config.limits.template_timeout
    )
    source = template.sources if template is not None else ""
    return Served(
        names=(config.model.served_model_name or checkpoint.name,),
        tokenizer=tokenizer,
        template=template,
        sampling=defaults,
        formats=choose(source, config.model.tool_call_parser, config.model.reasoning_parser),
    )


def load_tokenizer(config: Config) -> Tokenizer:
    """The tokenizer alone: all that a detokenizer needs."""
    return Tokenizer.of(find(config, lambda stage, fraction: None))


def find(config: Config, report: Report) -> Checkpoint:
    return locate(config.model.model, config.model.revision, config.model.tokenizer_path, report)
