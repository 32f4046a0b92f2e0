"""The generated command line, the environment and the file, and `--explain`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from radixlm.base.errors import StartupError
from radixlm.config import cli, env, file
from radixlm.config.explain import explain
from radixlm.config.options import OPTIONS, Option
from radixlm.config.resolve import Given, Resolved, derive


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for option in OPTIONS:
        monkeypatch.delenv(option.env, raising=False)
    for name in (env.CACHE, env.CONFIG, "XDG_CACHE_HOME", "NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)


def parser() -> cli.Parser:
    made = cli.Parser("radixlm serve", "Serve.", "radixlm serve [options]")
    cli.add_options(made)
    return made


def resolved(*argv: str, model: str | None = None) -> Resolved:
    return cli.read(parser().parse(argv), model)


# ---- flags


def test_no_flags_are_the_defaults() -> None:
    assert set(resolved().origins.values()) == {"default"}


#: Texts for the options that the general rule below does not suit.
_TEXTS = {"allowed_origins": "*", "root_path": "/x", "mem_fraction_static": "0.5", "max_body_bytes": "4096"}


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_option_is_a_flag_under_every_name_and_in_the_help(option: Option) -> None:
    text = " ".join(parser().format_help().split())
    assert option.env in text
    assert option.help in text
    value = [_TEXTS.get(option.name, option.choices[0] if option.choices else "1")]
    for flag in option.flags:
        assert f"{flag} " in text or f"{flag}," in text
        said = resolved(flag, *(value if option.kind is not bool else []))
        assert said.origins[option.name] == f"flag {option.flags[0]}"
    for key in option.off_keys:
        assert resolved(f"--{key}").origins[option.name] == f"flag {option.flags[0]}"


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--port", "8000"], "port", 8000),
        (["-p", "8000"], "port", 8000),
        (["--port=8000"], "port", 8000),
        (["--page_size=16"], "page_size", 16),
        (["--block-size", "16"], "page_size", 16),
        (["-c", "4096", "-t", "2"], "context_length", 4096),
        (["--max_model_len", "4096"], "context_length", 4096),
        (["--disable-radix-cache"], "disable_radix_cache", True),
        (["--no-enable-prefix-caching"], "disable_radix_cache", True),
        (["--disable-radix-cache", "--enable-radix-cache"], "disable_radix_cache", False),
        (["--enable-metrics"], "disable_metrics", False),
        (["--port", "1", "--port", "2"], "port", 2),
        (["--served-model-name", "a_b=c"], "served_model_name", "a_b=c"),
    ],
)
def test_spellings(argv: Sequence[str], name: str, value: object) -> None:
    config = resolved(*argv).config
    owner = next(option.owner for option in OPTIONS if option.name == name)
    assert getattr(getattr(config, owner), name) == value


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--prot", "1"], "unknown flag --prot; did you mean --port?"),
        (["--attn-backend=x"], "unknown flag --attn-backend; did you mean --attention-backend?"),
        (["--zzzzzz"], "unknown flag --zzzzzz; radixlm serve --help lists all flags"),
        (["--mode", "x"], "unknown flag --mode; did you mean --model?"),  # no abbreviations
        (["stray"], "unexpected argument 'stray'"),
        (["--port"], "--port/-p: expected one argument"),
        (["--port", "x"], "--port is 'x'; it must be a whole number"),
        (["--dtype", "int4"], "--dtype is 'int4'; it must be one of auto"),
        (["--max-prefill-tokens", "1", "--chunked-prefill-size", "2"], "max-prefill-tokens (1) is smaller than"),
        (["--config", "/no/such.yaml"], "cannot read the configuration file /no/such.yaml: No such file"),
    ],
)
def test_a_wrong_command_line_is_answered_in_one_line(argv: Sequence[str], complaint: str) -> None:
    with pytest.raises(StartupError) as caught:
        resolved(*argv)
    assert complaint in caught.value.message
    assert "\n" not in caught.value.message


def test_the_model_may_be_a_plain_argument() -> None:
    said = resolved(model="some/dir")
    assert said.config.model.model == "some/dir"
    assert said.origins["model"] == "argument"
    assert resolved("--model", "a", model="a").config.model.model == "a"
    with pytest.raises(StartupError, match="two models are given: b and, with --model, a"):
        resolved("--model", "a", model="b")


def test_options_of_some_owners_only_and_some_in_silence() -> None:
    made = cli.Parser("radixlm run", "Run.", "radixlm run")
    cli.add_options(made, owners=cli.ENGINE, shown=("model",))
    text = made.format_help()
    assert "--dtype" in text
    assert "--page-size" not in text
    assert cli.read(made.parse(["--page-size", "4"])).config.cache.page_size == 4
    with pytest.raises(StartupError, match="unknown flag --port"):
        made.parse(["--port", "1"])


# ---- environment


def test_a_twin_for_every_option(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(option.env == f"RADIXLM_{option.key.upper().replace('-', '_')}" for option in OPTIONS)
    monkeypatch.setenv("RADIXLM_CHUNKED_PREFILL_SIZE", "1024")
    monkeypatch.setenv("RADIXLM_DISABLE_RADIX_CACHE", "yes")
    monkeypatch.setenv("RADIXLM_LOG_REQUESTS", "0")
    monkeypatch.setenv("RADIXLM_HOST", "")
    said = resolved()
    assert said.config.schedule.chunked_prefill_size == 1024
    assert said.config.cache.disable_radix_cache
    assert not said.config.observe.log_requests
    assert said.config.server.host == "127.0.0.1"
    assert said.origins["chunked_prefill_size"] == "env RADIXLM_CHUNKED_PREFILL_SIZE"
    assert said.origins["host"] == "default"


def test_a_wrong_twin_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXLM_PAGE_SIZE", "big")
    with pytest.raises(StartupError, match="RADIXLM_PAGE_SIZE is 'big'; it must be a whole number"):
        resolved()


def test_a_port_set_by_an_orchestrator_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXLM_PORT", "tcp://10.0.0.7:30000")
    with pytest.raises(StartupError, match="service called radixlm"):
        resolved()


def test_stray_variables_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RADIXLM_PAGESIZE", "RADIXLM_SERVICE_HOST", "RADIXLM_PORT_30000_TCP", "RADIXLM_CACHE"):
        monkeypatch.setenv(name, "x")
    assert env.strays() == ["RADIXLM_PAGESIZE names no option; did you mean RADIXLM_PAGE_SIZE?"]


def test_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert env.cache_dir() == tmp_path / ".cache" / "radixlm"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert env.cache_dir() == tmp_path / "xdg" / "radixlm"
    monkeypatch.setenv("RADIXLM_CACHE", "~/ours")
    assert env.cache_dir() == tmp_path / "ours"


def test_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not env.no_color()
    monkeypatch.setenv("TERM", "dumb")
    assert env.no_color()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert env.no_color()


def test_the_report_stars_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXLM_API_KEY", "hunter2")
    monkeypatch.setenv("HF_TOKEN", "hunter3")
    monkeypatch.setenv("RADIXLM_PORT", "1")
    report = env.report()
    assert report["RADIXLM_API_KEY"] == report["HF_TOKEN"] == "***"
    assert report["RADIXLM_PORT"] == "1"


# ---- file


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "radixlm.yaml"
    path.write_text(text)
    return str(path)


def test_a_file_with_dashes_underscores_synonyms_and_switches(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "port: 8000\nchunked_prefill_size: 64\nmax-model-len: 128\nenable-radix-cache: false\n"
        "shutdown-timeout: 5\nserved-model-name: null\ndtype: bf16\n",
    )
    said = resolved("--config", path)
    config = said.config
    assert config.server.port == 8000
    assert config.schedule.chunked_prefill_size == 64
    assert config.model.context_length == 128
    assert config.cache.disable_radix_cache
    assert config.server.shutdown_timeout == 5.0
    assert config.model.served_model_name is None
    assert config.model.dtype == "bfloat16"
    assert said.origins["port"] == "file radixlm.yaml"


def test_flag_over_environment_over_file_over_a_verbs_default_over_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "port: 1\nhost: file\npage-size: 1\nlog-level: debug\n")
    monkeypatch.setenv("RADIXLM_CONFIG", path)
    monkeypatch.setenv("RADIXLM_PORT", "2")
    monkeypatch.setenv("RADIXLM_HOST", "env")
    weakest = {
        "log_level": Given("warning", "verb", "log_level"),
        "log_requests": Given(True, "verb", "log_requests"),
    }
    said = cli.read(parser().parse(["--port", "3"]), None, weakest)
    assert (said.config.server.port, said.config.server.host, said.config.cache.page_size) == (3, "env", 1)
    assert (said.config.observe.log_level, said.config.observe.log_requests) == ("debug", True)
    assert [said.origins[name] for name in ("port", "host", "page_size", "log_level", "log_requests", "dtype")] == [
        "flag --port",
        "env RADIXLM_HOST",
        "file radixlm.yaml",
        "file radixlm.yaml",
        "verb",
        "default",
    ]


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    assert file.read(write(tmp_path, "# nothing\n")) == {}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("prot: 1", "prot in radixlm.yaml is not a known option; did you mean port?"),
        ("port: '8000'", "port in radixlm.yaml is '8000'; it must be a whole number"),
        ("api-key: 123", "api-key in radixlm.yaml is a value that is not shown; it must be text"),
        ("port: 1\np: 2", "gives port twice: as port and as p"),
        ("- port", "holds no `name: value` lines"),
        ("a: b: c", "not valid YAML: line 1"),
        ("port: !!python/object/apply:os.system ['true']", "not valid YAML: line 1"),
    ],
)
def test_a_wrong_file_is_answered_in_one_line(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(StartupError) as caught:
        resolved("--config", write(tmp_path, text))
    assert complaint in caught.value.message
    assert "\n" not in caught.value.message


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "weights.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(StartupError, match="not UTF-8"):
        file.read(path)


# ---- explain


def test_explain_tells_value_origin_and_reason_of_every_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXLM_HOST", "0.0.0.0")
    said = resolved("--api-key", "hunter2", "--port", "8000")
    text = explain(said, derive(said.config, "cpu")[1])
    lines = {line.split()[0]: line for line in text.splitlines() if line.startswith("  ")}
    assert set(lines) == {option.key for option in OPTIONS}
    assert "8000" in lines["port"]
    assert "flag --port" in lines["port"]
    assert "env RADIXLM_HOST" in lines["host"]
    assert lines["chunked-prefill-size"].split()[1:3] == ["512", "derived"]
    assert "the model's" in lines["context-length"]
    assert "default" in lines["dtype"]
    assert "hunter2" not in text
    assert "***" in lines["api-key"]
