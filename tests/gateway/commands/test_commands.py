"""`goodgate serve`, `chat` and `doctor` as processes: what they print, how they end, and that nothing stays behind."""

from __future__ import annotations

import http.server
import importlib.metadata
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from adapters.errors import EngineUnavailable
from gateway.commands.chat import stream_answer
from gateway.tenants.keys import KeyStore, NewKey
from tests.gateway.rig import fake_model, free_port

ROOT = Path(__file__).parents[3]
PATIENCE_S = 20


def goodgate(*words: str, home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "goodgate", *words],
        cwd=ROOT,
        env={**os.environ, "GOODGATE_HOME": str(home), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def write_config(folder: Path, *models: dict[str, Any], **sections: Any) -> Path:
    path = folder / "goodgate.yaml"
    path.write_text(json.dumps({"server": {"port": 0}, "models": list(models), **sections}))
    return path


@contextmanager
def running(
    config: Path, *words: str, home: Path, environment: Mapping[str, str] = os.environ
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A serving process and the url that it says it listens on."""
    process = subprocess.Popen(
        [sys.executable, "-m", "goodgate", "serve", "--config", str(config), *words],
        cwd=ROOT,
        env={**environment, "GOODGATE_HOME": str(home)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if match := re.search(r"listens on (http://\S+)", line):
                yield process, match[1]
                break
        else:
            raise AssertionError("it never listened")
    finally:
        process.kill()
        process.communicate()


def is_ready(url: str, path: str = "/ready") -> bool:
    try:
        with urllib.request.urlopen(url + path, timeout=5):
            return True
    except OSError:
        return False


def await_ready(url: str, path: str = "/ready") -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_ready(url, path):
        assert time.monotonic() < deadline, "never ready"
        time.sleep(0.05)


def test_serve_chat_and_a_clean_end_on_sigterm(tmp_path: Path) -> None:
    config = write_config(tmp_path, fake_model(tokens=7))
    with running(config, home=tmp_path) as (process, url):
        await_ready(url)
        asked = goodgate("chat", "--url", url, "Hello", home=tmp_path)
        assert (asked.returncode, asked.stderr) == (0, "")
        assert len(asked.stdout.split()) == 7
        unknown = goodgate("chat", "--url", url, "--model", "n", "Hello", home=tmp_path)
        assert unknown.returncode == 1
        assert unknown.stderr == "There is no model 'n'; there is: m.\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.replay("F19")
def test_f19_sigterm_lets_an_open_stream_finish(tmp_path: Path) -> None:
    config = write_config(tmp_path, fake_model(itl_ms=40, tokens=25))
    with running(config, home=tmp_path) as (process, url):
        await_ready(url)
        chat = subprocess.Popen(
            [sys.executable, "-m", "goodgate", "chat", "--url", url, "Hello"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert chat.stdout is not None
        first = chat.stdout.read(3)
        process.send_signal(signal.SIGTERM)
        rest, _ = chat.communicate(timeout=PATIENCE_S)
        assert chat.returncode == 0
        assert len((first + rest).split()) == 25
        assert process.wait(PATIENCE_S) == 0


def test_a_port_in_use_is_one_sentence_and_exit_1(tmp_path: Path) -> None:
    config = write_config(tmp_path, fake_model())
    with running(config, home=tmp_path) as (_, url):
        port = url.rpartition(":")[2]
        for words in ([], ["--workers", "2"]):
            second = goodgate("serve", "--config", str(config), "--port", port, *words, home=tmp_path)
            assert second.returncode == 1
            assert second.stderr.strip().startswith(f"Port {port} on 127.0.0.1 is in use;")
            assert second.stderr.count("\n") == 1


def test_a_missing_model_stops_serving_with_what_to_do(tmp_path: Path) -> None:
    launched = {"name": "m", "replicas": [{"engine": "native", "launch": True, "model": "absent"}]}
    in_process = {"name": "m", "replicas": [{"engine": "native", "options": {"model": "absent"}}]}
    for faulty in (launched, in_process):
        result = goodgate("serve", "--config", str(write_config(tmp_path, faulty)), home=tmp_path)
        assert result.returncode == 1
        assert f"Model 'absent' is not in {tmp_path / 'models'}; run `goodgate models import" in result.stderr
        assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--config", "none.yaml"], "Cannot read the configuration none.yaml"),
        (["--config", "README.absent", "--check-config"], "Cannot read the configuration"),
    ],
)
def test_a_missing_configuration_is_one_sentence_and_exit_2(tmp_path: Path, words: list[str], sentence: str) -> None:
    result = goodgate("serve", *words, home=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith(sentence)
    assert result.stderr.count("\n") == 1


def test_a_bad_configuration_is_exit_2_and_a_good_one_is_said_to_be(tmp_path: Path) -> None:
    bad = write_config(tmp_path, {"name": "m", "replica": []})
    result = goodgate("serve", "--config", str(bad), home=tmp_path)
    assert (result.returncode, "did you mean `replicas`?" in result.stderr) == (2, True)
    good = write_config(tmp_path, fake_model())
    result = goodgate("serve", "--config", str(good), "--check-config", home=tmp_path)
    assert (result.returncode, result.stderr) == (0, f"{good} is valid.\n")
    result = goodgate("serve", "--config", str(good), "--print-config", "--port", "1234", home=tmp_path)
    assert result.returncode == 0
    assert "port: 1234" in result.stdout


def test_workers_share_a_port_and_end_together(tmp_path: Path) -> None:
    config = write_config(tmp_path, fake_model(), server={"port": free_port(), "max_in_flight": 7})
    with running(config, "--workers", "2", home=tmp_path) as (process, url):
        await_ready(url)
        assert goodgate("chat", "--url", url, "Hello", home=tmp_path).returncode == 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{url}/health", timeout=1)


def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    config = write_config(tmp_path, fake_model(), server={"port": free_port()})
    with running(config, "--workers", "2", home=tmp_path) as (process, url):
        await_ready(url)
        process.kill()
        deadline = time.monotonic() + PATIENCE_S
        while is_ready(url):
            assert time.monotonic() < deadline, "a worker outlived its parent"
            time.sleep(0.05)


@pytest.mark.parametrize(
    ("replica", "reason"),
    [
        ({"engine": "native", "options": {"model": "x"}}, "runs inside the gateway's process"),
        ({"engine": "fake", "launch": True, "model": "x"}, "is launched by the gateway"),
    ],
)
def test_an_engine_that_workers_cannot_share_is_refused(tmp_path: Path, replica: dict[str, Any], reason: str) -> None:
    config = write_config(tmp_path, {"name": "m", "replicas": [replica]})
    result = goodgate("serve", "--config", str(config), "--workers", "2", home=tmp_path)
    assert result.returncode == 2
    assert reason in result.stderr
    assert "--workers 1" in result.stderr


def test_chat_without_a_gateway_says_how_to_start_one(tmp_path: Path) -> None:
    result = goodgate("chat", "--url", f"http://127.0.0.1:{free_port()}", "Hello", home=tmp_path)
    assert result.returncode == 1
    assert "start one with `goodgate serve`" in result.stderr


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("http://127.0.0.1:99999", "is no gateway address"),
        ("http://[::1", "is no gateway address"),
        ("ftp://127.0.0.1", "is no gateway address"),
        ("{server}", "is no Goodgate"),
    ],
)
def test_chat_with_something_that_is_no_gateway_is_one_sentence(tmp_path: Path, url: str, sentence: str) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Stranger)
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        result = goodgate("chat", "--url", url.format(server=address), "Hello", home=tmp_path)
        server.shutdown()
    assert (result.returncode, result.stderr.count("\n")) == (1, 1), result.stderr
    assert sentence in result.stderr


def test_chat_with_a_key_that_fits_no_model_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = KeyStore(tmp_path).create(NewKey(name="a", models=("other*",)))
    with running(write_config(tmp_path, fake_model()), home=tmp_path) as (_, url):
        monkeypatch.setenv("GOODGATE_API_KEY", secret)
        result = goodgate("chat", "--url", url, "Hello", home=tmp_path)
    assert (result.returncode, result.stderr.count("\n")) == (1, 1), result.stderr
    assert "This key may use none of the models here" in result.stderr


def test_chat_does_not_wait_for_whoever_does_not_even_list_his_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.commands.chat.CONNECT_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(EngineUnavailable, match="is silent; is that the gateway's address"):
            next(stream_answer(url, "Hello", model=None, max_tokens=1))


def test_chat_is_answered_by_an_engine_that_knows_no_temperature(tmp_path: Path) -> None:
    with running(write_config(tmp_path, fake_model()), home=tmp_path) as (_, behind):
        options = {"url": behind, "parameters": ["max_tokens"]}
        strict = {"name": "m", "replicas": [{"engine": "openai_compatible", "options": options}]}
        with running(write_config(tmp_path, strict), home=tmp_path) as (_, url):
            plain = goodgate("chat", "--url", url, "Hello", home=tmp_path)
            asked = goodgate("chat", "--url", url, "--temperature", "0.5", "Hello", home=tmp_path)
    assert (plain.returncode, bool(plain.stdout.strip())) == (0, True), plain.stderr
    assert (asked.returncode, "'temperature'" in asked.stderr) == (1, True)


class Stranger(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "5")
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the test's output is for failures."""


def test_a_second_signal_ends_the_wait_for_open_answers(tmp_path: Path) -> None:
    config = write_config(tmp_path, fake_model(itl_ms=1000, tokens=60))
    with running(config, home=tmp_path) as (process, url):
        await_ready(url)
        command = [sys.executable, "-m", "goodgate", "chat", "--url", url, "Hello"]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as chat:
            assert chat.stdout is not None
            chat.stdout.read(1)
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            assert process.wait(5) == 0
            assert "shutting down" in chat.communicate(timeout=PATIENCE_S)[1]
            assert chat.returncode == 1


def test_the_version_is_told(tmp_path: Path) -> None:
    result = goodgate("--version", home=tmp_path)
    assert (result.returncode, result.stdout) == (0, f"goodgate {importlib.metadata.version('goodgate')}\n")


def test_serve_finds_its_default_configuration_from_any_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "goodgate", "serve", "--check-config"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "GOODGATE_HOME": str(tmp_path)}
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, f"{ROOT / 'configs' / 'local.yaml'} is valid.\n")


def test_doctor_fails_what_the_configuration_needs_and_says_what_to_do(tmp_path: Path) -> None:
    native = {"engine": "native", "options": {"model": "smollm2-135m-instruct"}}
    launched = {"engine": "llama_cpp", "launch": True, "model": "smollm2-135m-instruct"}
    config = write_config(tmp_path, {"name": "m", "replicas": [native, launched]})
    result = goodgate("doctor", "--config", str(config), home=tmp_path)
    assert result.returncode == 1
    assert "FAIL  models: not complete" in result.stdout
    assert "goodgate models pull" in result.stdout
    assert "FAIL  engine llama_cpp: not installed here" in result.stdout


def test_doctor_is_content_where_the_engines_run_elsewhere(tmp_path: Path) -> None:
    config = write_config(tmp_path, fake_model())
    result = goodgate("doctor", "--config", str(config), home=tmp_path)
    assert result.returncode == 0
    assert "note  models: none" in result.stdout
    assert "note  engine llama_cpp: not installed here" in result.stdout
    for subject in ("Python", "torch", "C compiler", "configuration", "port", "engine fake", "engine vllm"):
        assert f"  {subject}:" in result.stdout


@pytest.mark.parametrize("command", ["serve", "chat", "doctor"])
def test_help_has_an_example(tmp_path: Path, command: str) -> None:
    result = goodgate(command, "--help", home=tmp_path)
    assert result.returncode == 0
    assert f"Example: goodgate {command}" in result.stdout
