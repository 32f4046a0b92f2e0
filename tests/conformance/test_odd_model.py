"""MSG-4, TMPL-1, TMPL-3, TOKID-3, SAMP-4, LOADM-5: what a checkpoint may hold and must not be able to do."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support import tiny
from support.live import Refused, Server, deltas, finishes, together
from support.words import VOCAB, decode

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def test_msg_4_a_template_that_refuses_a_role(odd: Server) -> None:
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    error = odd.refused(CHAT, {"model": odd.model, "messages": messages, "max_tokens": 64})
    assert "I know no system role, sorry" in error["message"] and error["param"] == "messages"


def test_tmpl_1_template_arguments_reach_the_template(odd: Server) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    prompts = {}
    for thinking in (True, False, None):
        arguments = {"my_unknown_flag": 1, **({} if thinking is None else {"enable_thinking": thinking})}
        tokens = odd.tokenize(messages=messages, chat_template_kwargs=arguments)
        asked = odd.chat("Hi", max_tokens=2, chat_template_kwargs=arguments, return_token_ids=True)
        assert asked["prompt_token_ids"] == tokens
        prompts[thinking] = decode(tokens, skip_special_tokens=False)
    assert prompts[True] == prompts[None]
    assert prompts[False] == prompts[True] + "<no thinking>\n"


def test_tokid_3_padded_rows_are_never_chosen(odd: Server) -> None:
    wild = {"max_new_tokens": 50, "temperature": 2.0, "top_k": -1, "top_p": 1.0, "ignore_eos": True}
    scored = {"text": "Say it:", "return_logprob": True, "top_logprobs_num": 5}

    def check(sampling: dict[str, Any]) -> None:
        answer = odd.ask("/generate", {**scored, "sampling_params": {**wild, **sampling}})
        assert len(answer["output_ids"]) == 50
        assert max(answer["output_ids"]) < VOCAB
        for top in answer["meta_info"]["output_top_logprobs"]:
            assert len(top) == 5 and all(token < VOCAB for _, token, _ in top)
        assert all(value <= 0 for value, _, _ in answer["meta_info"]["output_token_logprobs"])

    together(partial(check, {"sampling_seed": seed}) for seed in range(1, 21))
    for sampling in ({"temperature": 0}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.01}):
        check(sampling)
    choice = odd.complete(prompt="Say it:", max_tokens=8, logprobs=5, temperature=2.0, seed=1)["choices"][0]
    assert all(len(top) in (5, 6) for top in choice["logprobs"]["top_logprobs"])


def test_tokid_3_a_bias_cannot_choose_them_either(odd: Server) -> None:
    width = VOCAB + tiny.PADDING
    asked = {"prompt": "Say it:", "max_tokens": 4, "return_token_ids": True, "ignore_eos": True}
    biased = odd.complete(**asked, logit_bias={str(width - 1): 100})["choices"][0]["token_ids"]
    assert biased == odd.complete(**asked)["choices"][0]["token_ids"]
    error = odd.refused(COMPLETIONS, {"model": odd.model, **asked, "logit_bias": {str(width): 100}})
    assert error["param"] == "logit_bias"
    assert odd.refused(COMPLETIONS, {"model": odd.model, "prompt": [width]})["param"] == "prompt"


@pytest.mark.parametrize("stream", [False, True])
def test_samp_4_numbers_that_are_none_are_contained(odd: Server, stream: bool) -> None:
    asked = {"prompt": [100], "max_tokens": 60, "ignore_eos": True}
    alone = odd.text(**asked)

    def broken() -> str:
        body = {"model": odd.model, "prompt": [tiny.BROKEN], "max_tokens": 8, "temperature": 0}
        with pytest.raises(Refused) as caught:
            odd.events(COMPLETIONS, body) if stream else odd.ask(COMPLETIONS, body)
        assert caught.value.status == 500
        assert caught.value.error["code"] == "model_error" and "finite" in caught.value.error["message"]
        return ""

    def beside() -> str:
        chunks = odd.complete_stream(**asked)
        assert finishes(chunks) == ["length"]
        return "".join(deltas(chunks))

    texts = together([beside, broken, broken, beside, broken])
    assert [texts[0], texts[3]] == [alone, alone]


def test_samp_4_what_was_broken_is_not_cached(odd: Server) -> None:
    """A prefix that holds a broken token must not spoil those that do not."""
    body = {"model": odd.model, "prompt": [100, 101, 102, tiny.BROKEN, 103], "max_tokens": 4}
    for _ in range(2):
        with pytest.raises(Refused):
            odd.ask(COMPLETIONS, body)
    asked = {"prompt": [100, 101, 102, 104], "max_tokens": 8, "ignore_eos": True}
    warm = odd.text(**asked)
    odd.flush()
    assert odd.text(**asked) == warm


def test_loadm_5_defaults_from_generation_config(odd: Server) -> None:
    """Used, shown by an info route, and an explicit value of the request wins."""
    asked: dict[str, Any] = {"content": "Hi", "max_tokens": 12, "seed": 1}
    greedy = odd.chat(**asked, temperature=0)["choices"]
    assert odd.chat(**asked, temperature=None)["choices"] == greedy
    free = odd.chat(**asked, temperature=1, top_k=-1, top_p=1)["choices"]
    assert free != greedy
    shown = odd.get("/model_info").json()["sampling_defaults"]
    assert shown == {"temperature": 0.01, "top_k": 1, "top_p": 0.9}


@pytest.fixture(scope="module")
def plain_defaults(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The odd model with OpenAI's defaults, and with a template that would break out if it could."""
    place = tmp_path_factory.mktemp("hostile")
    template = place / "hostile.jinja"
    template.write_text(HOSTILE_TEMPLATE)
    options = ("--sampling-defaults", "openai", "--chat-template", str(template))
    server = Server(tiny.odd(place / "odd"), "--max-total-tokens", "8192", *options)
    yield server
    server.stop()


def test_loadm_5_the_option_that_ignores_it(plain_defaults: Server) -> None:
    asked = {"prompt": "Hi", "max_tokens": 12, "seed": 1}
    greedy = plain_defaults.text(**asked, temperature=0)
    free = plain_defaults.text(**asked, temperature=None)
    assert free != greedy
    assert free == plain_defaults.text(**asked, temperature=1, top_k=-1, top_p=1)
    assert plain_defaults.get("/model_info").json()["sampling_defaults"] == {}


def test_loadm_5_top_k_zero_means_off(tmp_path: Path) -> None:
    shape = tiny.config()
    generation = {"temperature": 1.0, "top_k": 0, "min_p": "x"}
    path = tiny.write(tmp_path / "m", shape, tiny.random_weights(shape), generation_config=generation)
    server = Server(path, "--device", "null")
    try:
        assert server.get("/model_info").json()["sampling_defaults"] == {"temperature": 1.0}
        assert "generation_config.json" in server.log(), "a value that makes no sense is to be mentioned"
    finally:
        server.stop()


#: From a text to its class, to `object`, to a class that can open files.
HOSTILE_TEMPLATE = (
    "{{ messages[0].content }}"
    "{% for c in ''.__class__.__mro__[1].__subclasses__() %}"
    "{% if c.__name__ == '_wrap_close' %}{{ c.__init__.__globals__['open']('pwned', 'w').write('x') }}{% endif %}"
    "{% endfor %}"
)


def test_tmpl_3_templates_run_in_a_sandbox(plain_defaults: Server) -> None:
    """The server's working directory is its scratch directory, where `pwned` would appear."""
    messages = [{"role": "user", "content": "Hi"}]
    error = plain_defaults.refused(CHAT, {"model": plain_defaults.model, "messages": messages, "max_tokens": 64})
    assert "not allowed" in error["message"]
    assert not [path for path in plain_defaults.scratch.rglob("*") if path.name == "pwned"]
    assert plain_defaults.text(prompt="Hi", max_tokens=2)
