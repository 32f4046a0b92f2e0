"""The `radixlm` command: verbs, failures in one line, conversations, the banner, and how fast help is."""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest

from radixlm.base.errors import BadRequest, Unauthorized, Unavailable
from radixlm.base.facts import DeviceFacts, EngineFacts, ModelFacts, PoolFacts
from radixlm.cli import asking, demo, run
from radixlm.cli.banner import attention, banner, loopback
from radixlm.cli.chat import Conversation
from radixlm.cli.completion import script
from radixlm.cli.main import VERBS, main
from radixlm.cli.progress import StartProgress
from radixlm.cli.screen import Screen
from radixlm.cli.talk import INTERRUPTED, Piece, Prompt, Remote, Turn, ask
from radixlm.cli.units import count, size
from radixlm.config import env, resolve
from radixlm.config.options import OPTIONS
from radixlm.config.schema import Config


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*(option.env for option in OPTIONS), env.CACHE, env.CONFIG):
        monkeypatch.delenv(name, raising=False)


# ---- the command itself


def test_importing_the_command_loads_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "rich", "yaml", "msgspec", "numpy", "asyncio", "zmq", "starlette", "tokenizers")
    script = (
        f"import sys, radixlm.cli.main, radixlm.cli.chat; print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("argv", [["--help"], ["serve", "--help"], ["chat", "--help"], ["serve", "--nonsense"]])
def test_help_takes_less_than_300_ms_of_processor_time(argv: list[str]) -> None:
    def seconds() -> float:
        process = subprocess.Popen(
            [sys.executable, "-m", "radixlm", *argv], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == (2 if "--nonsense" in argv else 0)
        return usage.ru_utime + usage.ru_stime

    # The best of some: with the other core busy the same instructions take longer.
    assert any(seconds() < 0.3 for _ in range(10))


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == main(["--help"]) == main(["help"]) == 0
    out = capsys.readouterr().out
    for verb in VERBS.values():
        assert verb.usage in out
        assert verb.help in out


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    assert f"usage: radixlm {verb}" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == main(["--version"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == second
    assert first.startswith("radixlm ")


def test_env_is_a_block_to_paste_without_secrets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RADIXLM_API_KEY", "hunter2")
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("```\n")
    assert out.endswith("```\n")
    assert "hunter2" not in out
    for name in ("python", "torch", "RADIXLM_API_KEY"):
        assert name in out


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["sevre"], "unknown verb 'sevre'; did you mean serve?"),
        (["qqqq"], "unknown verb 'qqqq'; there are serve, run"),
        (["serve", "--prot", "1"], "unknown flag --prot; did you mean --port?"),
        (["serve", "--port", "banana"], "--port is 'banana'; it must be a whole number"),
        (["serve", "a", "b"], "unexpected argument 'b'"),
        (["serve", "--config", "/no/such.yaml"], "cannot read the configuration file"),
        (["run", "--temperature", "warm", "hi"], "argument --temperature: invalid float value: 'warm'"),
        (["run", "--max-tokens", "0", "hi"], "--max-tokens is 0; it must be at least 1"),
        (["run", "what", "is", "this"], "3 arguments are given; put the prompt in quotes"),
        (["run", "--raw", "--system", "s", "hi"], "--system needs the chat template"),
        (["run", "--port", "1", "hi"], "unknown flag --port"),
        (["run", "--url", "http://127.0.0.1:1", "hi"], "cannot reach http://127.0.0.1:1"),
        (["chat", "--url", "ftp://x"], "'ftp://x' is not a server's URL"),
        (["version", "--loud"], "unknown flag --loud"),
        (["bench", "sevre"], "did you mean serve?"),
    ],
)
def test_what_the_user_can_put_right_is_one_line_and_exit_code_2(
    argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert complaint in captured.err
    assert captured.err.startswith("radixlm: error: ")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("how", ["flag", "flag with =", "environment"])
def test_the_traceback_is_for_those_who_debug(
    how: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["serve", "--port", "banana"]
    if how == "flag":
        argv += ["--log-level", "debug"]
    elif how == "flag with =":
        argv += ["--log_level=debug"]
    else:
        monkeypatch.setenv("RADIXLM_LOG_LEVEL", "debug")
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert err.splitlines()[-1].startswith("radixlm: error: ")


def test_a_stray_variable_is_warned_of(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXLM_PROT", "1")
    assert main(["serve", "--explain", "--device", "cpu"]) == 0
    assert "RADIXLM_PROT names no option; did you mean RADIXLM_PORT?" in capsys.readouterr().err


def test_explain_prints_and_does_not_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "mymodel", "--explain", "--device", "cuda", "--port", "0"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")}
    assert lines["model"].split()[1:3] == ["mymodel", "argument"]
    assert lines["chunked-prefill-size"].split()[1:3] == ["8192", "derived"]
    assert main(["chat", "--explain", "--device", "cpu"]) == 0
    assert "default of this verb" in capsys.readouterr().out


def test_a_closed_pipe_is_no_error() -> None:
    script = f"{sys.executable} -m radixlm serve --help-markdown | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def completed(*words: str) -> set[str]:
    """What bash offers for the last of these words."""
    setup = (
        f"COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; _radixlm; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(["bash", "-c", f"{script()}\n{setup}"], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_completion_of_verbs_flags_and_values() -> None:
    assert completed("radixlm", "") == set(VERBS)
    assert completed("radixlm", "ser") == {"serve"}
    assert completed("radixlm", "serve", "--max-") >= {"--max-total-tokens", "--max-num-seqs"}
    assert completed("radixlm", "run", "--temp") == {"--temperature"}
    assert completed("radixlm", "serve", "--dtype", "b") == {"bfloat16"}
    assert completed("radixlm", "serve", "some/file") == set()


# ---- conversations


class Scripted:
    """A model whose answers are known: a talker like the others."""

    name = "scripted"

    def __init__(self, *answers: Sequence[Piece] | BaseException) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[Prompt, dict[str, Any]]] = []
        self.closed = 0

    def stream(self, prompt: Prompt, sampling: Mapping[str, Any]) -> Iterator[Piece]:
        self.asked.append((prompt if isinstance(prompt, str) else list(prompt), dict(sampling)))
        answer = self.answers.pop(0)
        try:
            if isinstance(answer, BaseException):
                yield Piece("so ", 5, 1)
                raise answer
            yield from answer
        finally:
            self.closed += 1

    def close(self) -> None:
        pass


def said(text: str, prompt: int = 10, cached: int = 0, finish: str = "stop") -> list[Piece]:
    words = text.split(" ")
    pieces = [Piece(word if i == 0 else f" {word}", prompt, i + 1, cached) for i, word in enumerate(words)]
    return [*pieces, Piece("", prompt, len(words), cached, finish)]


def test_ask_streams_and_counts() -> None:
    written: list[str] = []
    turn = ask(Scripted(said("a b c", prompt=20, cached=15)), "x", {}, written.append)
    assert written == ["a", " b", " c"]
    assert (turn.text, turn.prompt_tokens, turn.completion_tokens, turn.cached_tokens) == ("a b c", 20, 3, 15)
    assert turn.finish == "stop"
    assert 0 < turn.first <= turn.seconds
    assert turn.share == 0.75


def test_ask_of_an_empty_answer() -> None:
    turn = ask(Scripted([Piece("", 3, 0, 0, "stop")]), "x", {}, lambda text: None)
    assert (turn.text, turn.completion_tokens, turn.rate) == ("", 0, 0.0)
    assert turn.first == turn.seconds


def test_ctrl_c_ends_the_answer_and_keeps_what_came() -> None:
    talker = Scripted(KeyboardInterrupt())
    turn = ask(talker, "x", {}, lambda text: None)
    assert (turn.text, turn.finish) == ("so ", INTERRUPTED)
    assert talker.closed == 1


def test_an_error_closes_the_stream() -> None:
    talker = Scripted(BadRequest("too long"))
    with pytest.raises(BadRequest):
        ask(talker, "x", {}, lambda text: None)
    assert talker.closed == 1


def test_the_line_of_a_turn() -> None:
    turn = Turn("", 200, 11, 150, first=0.5, seconds=1.5, finish="length")
    assert str(turn) == (
        "first token 0.50 s | 11 tokens | 10.0 tok/s | prompt 200 tokens, 150 cached (75%) | "
        "cut at the token limit (--max-tokens)"
    )
    assert turn.rate == 10.0


def talk(talker: Scripted, *lines: str, system: str = "", sampling: dict[str, Any] | None = None) -> str:
    """Hold a conversation; the text that a person saw."""
    out = io.StringIO()
    rest = list(lines)

    def read(prompt: str) -> str:
        if not rest:
            raise EOFError
        return rest.pop(0)

    Conversation(talker, sampling if sampling is not None else {}, system, Screen(out, out, fancy=False)).run(read)
    return out.getvalue()


def messages(talker: Scripted, turn: int) -> list[tuple[str, str]]:
    prompt = talker.asked[turn][0]
    assert not isinstance(prompt, str)
    return [(message["role"], message["content"]) for message in prompt]


def test_a_chat_sends_its_history_and_shows_cached_tokens() -> None:
    talker = Scripted(said("one"), said("two", prompt=30, cached=12))
    seen = talk(talker, "first", "", "second", "/bye", "never read")
    assert messages(talker, 0) == [("user", "first")]
    assert messages(talker, 1) == [("user", "first"), ("assistant", "one"), ("user", "second")]
    assert "prompt 30 tokens, 12 cached (40%)" in seen
    assert len(talker.asked) == 2


def test_chat_commands() -> None:
    talker = Scripted(said("one"), said("two"), said("three"))
    sampling: dict[str, Any] = {"max_new_tokens": 9}
    seen = talk(
        talker, "a", "/reset", "b", "/system Be brief.", "/set temperature 0.5", "/set max-tokens 7", "c",
        "/set mood good", "/set top_k much", "/stats", "/help", "/what",
        sampling=sampling,
    )  # fmt: skip
    assert messages(talker, 1) == [("user", "b")]
    assert messages(talker, 2) == [("system", "Be brief."), ("user", "c")]
    assert talker.asked[2][1] == {"max_new_tokens": 7, "temperature": 0.5}
    assert "unknown parameter 'mood'" in seen
    assert "top_k cannot be 'much'" in seen
    assert "unknown command /what" in seen
    assert "turns" in seen
    assert "/bye" in seen
    assert len(talker.asked) == 3


def test_a_message_of_several_lines() -> None:
    talker = Scripted(said("one"), said("two"), said("three"))
    talk(talker, '"""a', "", '  b"""', '"""one line"""', '"""', "/bye", '"""')
    assert [messages(talker, turn)[-1][1] for turn in range(3)] == ["a\n\n  b", "one line", " /bye"]


def test_a_turn_that_fails_is_forgotten() -> None:
    talker = Scripted(BadRequest("the prompt is too long"), said("fine"))
    seen = talk(talker, "a", "b")
    assert "error: the prompt is too long" in seen
    assert messages(talker, 1) == [("user", "b")]


def test_an_interrupted_turn_stays_in_the_history() -> None:
    talker = Scripted(KeyboardInterrupt(), said("on"))
    seen = talk(talker, "a", "go on")
    assert INTERRUPTED in seen
    assert messages(talker, 1) == [("user", "a"), ("assistant", "so "), ("user", "go on")]


def test_the_demos_table() -> None:
    cold = Turn("", 700, 10, 0, first=1.0, seconds=2.0, finish="stop")
    warm = Turn("", 705, 10, 690, first=0.1, seconds=1.1, finish="stop")
    rows = {row[0]: row[1:] for row in demo.savings(cold, warm)}
    assert rows["found in the tree"] == ("0", "690", "98% of the second prompt")
    assert rows["computed"][:2] == ("700", "15")
    assert rows["first token after"] == ("1.000 s", "0.100 s", "10.0 times sooner")


def test_sampling_flags_reach_the_model_under_native_names() -> None:
    parsed = run.parser().parse(["hi", "--temperature", "0", "--top-k", "5", "--stop", "a", "--stop", "b"])
    assert asking.sampling(parsed) == {"max_new_tokens": 512, "temperature": 0.0, "top_k": 5, "stop": ["a", "b"]}
    parsed = run.parser().parse(["hi", "--seed", "3", "--max-new-tokens", "1", "--url", "x"])
    assert asking.sampling(parsed) == {"max_new_tokens": 1, "seed": 3}


# ---- a server behind a URL


class _Peer(BaseHTTPRequestHandler):
    """As much of an OpenAI-compatible server as a stream needs; it repeats the question."""

    def do_GET(self) -> None:
        self._send("application/json", json.dumps({"data": [{"id": "peer"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, body, self.headers.get("Authorization")))  # type: ignore[attr-defined]
        if self.headers.get("Authorization") != "Bearer k":
            self._send("application/json", json.dumps({"error": {"message": "wrong key"}}).encode(), 401)
            return
        chat = self.path.endswith("/chat/completions")
        text = body["messages"][-1]["content"] if chat else body["prompt"]
        chunks: list[dict[str, Any]] = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}] if chat else []
        if body.get("top_k") == 3:
            chunks.append({"choices": [{"delta": {"reasoning_content": "hm", "reasoning": "hm"}}]})
        for part in (text, "!"):
            chunks.append({"choices": [{"delta": {"content": part}} if chat else {"text": part}]})
        chunks.append({"choices": [{"delta": {}, "finish_reason": "length"}]})
        usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
        chunks.append({"choices": [], "usage": usage})
        events = [json.dumps(chunk) for chunk in chunks] + ["[DONE]"]
        self._send("text/event-stream", "".join(f"data: {event}\n\n" for event in events).encode())

    def _send(self, kind: str, content: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def peer() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Peer)
    server.seen = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def url(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_port}"


def test_remote_chat_and_raw_text(peer: ThreadingHTTPServer) -> None:
    talker = Remote(url(peer), "k")
    assert talker.name == "peer"
    thoughts: list[str] = []
    hello = [{"role": "user", "content": "hello"}]
    turn = ask(talker, hello, {"max_new_tokens": 2, "top_k": 3}, lambda text: None, thoughts.append)
    assert thoughts == ["hm", "\n\n"]
    assert (turn.text, turn.prompt_tokens, turn.completion_tokens, turn.cached_tokens) == ("hello!", 9, 2, 4)
    assert turn.finish == "length"
    assert ask(talker, "raw", {}, lambda text: None).text == "raw!"
    talker.close()
    (chat, body, _), (completions, _, _) = peer.seen  # type: ignore[attr-defined]
    assert (chat, completions) == ("/v1/chat/completions", "/v1/completions")
    assert body["max_tokens"] == 2
    assert body["top_k"] == 3
    assert "max_new_tokens" not in body


def test_remote_errors_are_the_servers_own(peer: ThreadingHTTPServer) -> None:
    talker = Remote(url(peer), "wrong", model="peer")
    with pytest.raises(Unauthorized, match="wrong key"):
        ask(talker, "x", {}, lambda text: None)
    talker.close()
    with pytest.raises(Unavailable, match="cannot reach"):
        Remote("http://127.0.0.1:1")


def test_run_against_a_server(
    peer: ThreadingHTTPServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RADIXLM_API_KEY", "k")
    assert main(["run", "hello", "--url", url(peer), "--system", "s", "--stats"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "hello!\n"
    assert "prompt 9 tokens, 4 cached (44%)" in captured.err
    assert peer.seen[0][1]["messages"] == [  # type: ignore[attr-defined]
        {"role": "system", "content": "s"},
        {"role": "user", "content": "hello"},
    ]
    assert main(["run", "other/model", "hello", "--url", url(peer)]) == 0
    assert peer.seen[1][1]["model"] == "other/model"  # type: ignore[attr-defined]


def test_run_reads_its_prompt_from_a_pipe(
    peer: ThreadingHTTPServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("piped\n"))
    assert main(["run", "--raw", "-", "--url", url(peer), "--api-key", "k"]) == 0
    assert capsys.readouterr().out == "piped!\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["run"]) == 2
    assert "the prompt is empty" in capsys.readouterr().err


def test_chat_against_a_server(
    peer: ThreadingHTTPServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n/bye\n"))
    assert main(["chat", "--url", url(peer), "--api-key", "k"]) == 0
    out = capsys.readouterr().out
    assert "peer listens" in out
    assert "hello!" in out
    assert "4 cached" in out


# ---- what is printed


FACTS = EngineFacts(
    model=ModelFacts(
        name="smollm2",
        path="/models/smollm2",
        architecture="llama",
        dtype="float32",
        parameters=134_515_008,
        layers=30,
        hidden_size=576,
        vocab_size=49152,
        sampled_vocab_size=49152,
        eos_ids=(2,),
        bos_id=1,
        context_length=8192,
        kv_bytes_per_token=46080,
        weight_bytes=538_000_000,
    ),
    device=DeviceFacts(kind="cpu", name="Some CPU", memory_total=1 << 34, memory_free=1 << 33, cores=2, threads=2),
    pool=PoolFacts(pages=65536, page_size=1, max_running=256, bytes=3_019_898_880),
    decisions={
        "prefill_attention": ("torch", "first choice"),
        "decode_attention": ("torch", "first choice"),
        "dtype": ("float32", "no 16-bit instructions"),
    },
    timings={},
)


def made(**values: Any) -> str:
    return banner(FACTS, resolve.override(Config(), values), "http://127.0.0.1:30000", 2.34)


def test_the_banner_tells_what_runs_and_why() -> None:
    text = made()
    assert len(text.splitlines()) <= 12
    for part in ("2.3 s", "smollm2", "Some CPU", "float32", "torch: first choice", "65,536 tokens", "3.02 GB", "lru",
                 "http://127.0.0.1:30000/v1", "no API key", "this machine only", "curl "):  # fmt: skip
        assert part in text
    assert "WARNING" not in text


def test_the_banner_names_both_attention_backends_if_they_differ() -> None:
    decisions = {**FACTS.decisions, "decode_attention": ("native", "faster for one token")}
    text = attention(msgspec.structs.replace(FACTS, decisions=decisions))
    assert text == "prefill torch: first choice; decode native: faster for one token"


def test_the_banner_warns_of_an_open_door() -> None:
    assert "WARNING: no API key" in made(host="0.0.0.0")
    assert "WARNING" not in made(host="0.0.0.0", api_key="hunter2")
    assert "hunter2" not in made(api_key="hunter2")
    assert "$RADIXLM_API_KEY" in made(api_key="hunter2")
    assert "off: prefixes are not kept" in made(disable_radix_cache=True)
    assert "/metrics" not in made(disable_metrics=True)


def test_the_line_to_try_is_a_valid_command() -> None:
    words = shlex.split(made(served_model_name="it's").splitlines()[-1])
    assert words[0] == "curl"
    assert json.loads(words[-1])["model"] == "it's"


@pytest.mark.parametrize(
    ("host", "inside"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("[::1]", True), ("127.8.8.8", True), ("0.0.0.0", False),
     ("::", False), ("10.0.0.1", False), ("example.org", False)],
)  # fmt: skip
def test_loopback(host: str, inside: bool) -> None:
    assert loopback(host) is inside


def test_sizes_for_people() -> None:
    assert [size(n) for n in (999, 1500, 2_500_000, 3_019_898_880)] == ["999 bytes", "1.5 kB", "2.5 MB", "3.02 GB"]
    assert [count(n) for n in (134_515_008, 7_200_000_000)] == ["135M", "7.2B"]


def test_a_plain_screen_has_no_colours_and_aligns() -> None:
    out = io.StringIO()
    screen = Screen(out, out, fancy=False)
    screen.line("title", "bold")
    screen.table("rows", [("a", "1", "x"), ("long", "22", "")])
    with screen.busy("loading"):
        pass
    assert out.getvalue() == "title\nrows\n  a     1   x\n  long  22\nloading ...\n"


def test_a_fancy_screen_keeps_control_characters_of_a_model_away() -> None:
    out = io.StringIO()
    screen = Screen(out, out, fancy=True)
    screen.write("a\x1b[2Jb\r\x07\té漢\n")
    assert out.getvalue() == "a[2Jb\té漢\n"
    screen.line("[bold]not markup[/bold]", "dim")
    assert "[bold]not markup[/bold]" in out.getvalue()
    screen.table("t", [("[red]", "x", "y")])
    assert "[red]" in out.getvalue()


def test_progress_in_plain_lines_is_one_line_a_stage() -> None:
    out = io.StringIO()
    with StartProgress(out, fancy=False) as progress:
        for step in range(5):
            progress.update("engine", "reading weights", step / 5)
        progress.update("engine", "sizing the pool", 0.0)
    assert out.getvalue() == "radixlm: engine: reading weights\nradixlm: engine: sizing the pool\n"


def test_progress_in_bars() -> None:
    out = io.StringIO()
    with StartProgress(out, fancy=True) as progress:
        progress.update("engine", "reading weights", 0.5)
        progress.update("engine", "sizing the pool", 0.0)
        progress.stop()
    assert "sizing the pool" in out.getvalue()
