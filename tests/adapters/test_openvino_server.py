"""OpenVINO's server over a scripted twin of the library: real processes and sockets, and every end of a request."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.errors import ContextLengthExceeded, InvalidRequest, UnsupportedParameter
from adapters.launching.launch import free_port
from adapters.openvino import Adapter
from adapters.servers.openvino_server import make_jobs
from adapters.servers.openvino_text import TextStream
from adapters.servers.openvino_worker import Job, generation_config
from adapters.types import decode_chat, decode_completion
from adapters.wire.engine_client import HTTPOptions
from tests.contract.conftest import collect
from tests.contract.tool_formats import ROME, told

pytest.importorskip("numpy", reason="the twin hands out numpy arrays, as the library does")

ROOT = Path(__file__).parents[2]
TWIN = Path(__file__).with_name("openvino_twin")
MODEL = "twin"
MAX_MODEL_LEN = 600


class Running:
    """A server process and a plain HTTP client for it."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, cancelled: Path) -> None:
        self.process = process
        self.port = port
        self.log = cancelled

    def open(self, path: str, body: Any = None) -> http.client.HTTPResponse:
        self.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        payload = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        self.connection.request("GET" if body is None else "POST", path, payload)
        return self.connection.getresponse()

    def send(self, path: str, body: Any = None) -> tuple[int, Any]:
        response = self.open(path, body)
        text = response.read()
        self.connection.close()
        return response.status, json.loads(text) if text.startswith(b"{") else text.decode()

    def complete(self, prompt: Any, **fields: Any) -> tuple[int, Any]:
        return self.send("/v1/completions", {"model": MODEL, "prompt": prompt, "max_tokens": 500, **fields})

    def stream(self, path: str, **fields: Any) -> list[Any]:
        """The stream's events, decoded; the last is the text [DONE] when it ended well."""
        with self.open(path, {"model": MODEL, "stream": True, "max_tokens": 500, **fields}) as response:
            assert response.status == 200
            blocks = response.read().decode().split("\n\n")
        self.connection.close()
        assert blocks.pop() == ""
        return [json.loads(block[6:]) if block != "data: [DONE]" else "[DONE]" for block in blocks]

    def cancelled(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@contextmanager
def running_server(folder: Path, *more: str) -> Iterator[Running]:
    model, cancelled, port = folder / "model.gguf", folder / "cancelled", free_port()
    model.write_bytes(b"GGUF")
    env = {**os.environ, "PYTHONPATH": f"{TWIN}{os.pathsep}{ROOT}", "TWIN_CANCELLED": str(cancelled)}
    command = [
        sys.executable,
        "-m",
        "adapters.servers.openvino_server",
        "--model",
        str(model),
        "--served-model-name",
        MODEL,
    ]
    command += ["--port", str(port), "--threads", "1", "--max-model-len", str(MAX_MODEL_LEN), *more]
    with subprocess.Popen(command, env=env) as process:
        server = Running(process, port, cancelled)
        try:
            wait_until(lambda: answers(server))
            yield server
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(10)


def answers(server: Running) -> bool:
    assert server.process.poll() is None, "the server ended while it was loading"
    try:
        return server.send("/health")[0] == 200
    except ConnectionError:
        return False


def wait_until(holds: Callable[[], bool], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_server(tmp_path_factory.mktemp("openvino")) as server:
        yield server


def test_a_chat_streams_role_text_finish_usage_and_done(server: Running) -> None:
    events = server.stream(
        "/v1/chat/completions",
        messages=[
            {"role": "developer", "content": "hé"},
            {"role": "user", "content": [{"type": "text", "text": "字😀"}]},
        ],
        stream_options={"include_usage": True},
    )
    prompt = "s:hé;u:字😀;"  # the developer's turn is the system's in a model's template
    num_bytes = len(prompt.encode())
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    pieces = [event["choices"][0]["delta"].get("content", "") for event in events[:-2]]
    assert "".join(pieces) == prompt
    assert all("\ufffd" not in piece for piece in pieces)
    assert events[-3]["choices"][0]["finish_reason"] == "stop"
    assert events[-2]["choices"] == []
    assert events[-2]["usage"] == {
        "prompt_tokens": num_bytes,
        "completion_tokens": num_bytes + 1,
        "total_tokens": 2 * num_bytes + 1,
    }
    assert events[-1] == "[DONE]"


def test_usage_is_streamed_only_to_those_who_ask(server: Running) -> None:
    assert not any("usage" in event for event in server.stream("/v1/completions", prompt="abc"))


def test_an_answer_in_one_piece_has_the_text_the_reason_and_the_exact_counts(server: Running) -> None:
    status, body = server.complete("漢字", max_tokens=4)
    assert status == 200
    assert body["choices"] == [{"index": 0, "text": "漢\ufffd", "finish_reason": "length", "logprobs": None}]
    assert body["usage"] == {"prompt_tokens": 6, "completion_tokens": 4, "total_tokens": 10}


def test_ignore_eos_goes_on_to_the_limit(server: Running) -> None:
    _, body = server.complete("ab", max_tokens=7, ignore_eos=True)
    assert body["choices"][0]["text"] == "ababa"  # the end token takes a place twice and has no text
    assert body["usage"]["completion_tokens"] == 7


def test_a_stop_string_ends_the_text_before_it_and_the_work_with_it(server: Running) -> None:
    _, body = server.complete("one two three STOP-HERE and on", stop=["never", "STOP-"])
    assert body["choices"][0] == {"index": 0, "text": "one two three ", "finish_reason": "stop", "logprobs": None}
    assert body["usage"]["completion_tokens"] == len("one two three STOP-")
    wait_until(lambda: "one two three STOP-HERE and on" in server.cancelled())


def test_the_choices_of_one_request_are_all_told_to_their_end(server: Running) -> None:
    events = server.stream("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], n=3)
    for index in range(3):
        choices = [event["choices"][0] for event in events[:-1] if event["choices"][0]["index"] == index]
        assert choices[0]["delta"]["role"] == "assistant"
        assert "".join(choice["delta"].get("content", "") for choice in choices) == "u:hi;"
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]


def test_token_ids_are_taken_as_a_prompt_and_checked(server: Running) -> None:
    assert server.complete([104, 105])[1]["choices"][0]["text"] == "hi"
    status, body = server.complete([104, 999])
    assert (status, body["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"logprobs": 2}, 400, "unsupported_parameter", "logprobs"),
        ({"echo": True}, 400, "unsupported_parameter", "echo"),
        ({"guided_json": {}}, 400, "invalid_value", "guided_json"),
        ({"temperature": 9}, 400, "invalid_value", "temperature"),
        ({"model": "other"}, 404, "model_not_found", "model"),
        ({"prompt": ""}, 400, "invalid_value", "prompt"),
        ({"prompt": "x" * 101}, 400, "context_length_exceeded", None),
        ({"prompt": "a [refuse] b"}, 400, "invalid_value", None),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    server: Running, fields: dict[str, Any], status: int, code: str, param: str | None
) -> None:
    answer, body = server.complete(**{"prompt": "x", **fields, "stream": True})
    assert (answer, body["error"]["code"], body["error"]["param"]) == (status, code, param)


def test_bodies_that_are_no_json_and_paths_that_are_none_get_the_envelope(server: Running) -> None:
    assert server.send("/v1/completions", b"{")[1]["error"]["type"] == "invalid_request_error"
    status, body = server.send("/v1/nothing")
    assert (status, body["error"]["type"]) == (404, "invalid_request_error")


def test_fields_that_ask_for_nothing_are_welcome(server: Running) -> None:
    assert server.complete("x", logprobs=None, logit_bias={}, best_of=1, top_k=-1, user="me")[0] == 200


def test_running_out_of_cache_in_a_stream_is_an_error_event_without_done(server: Running) -> None:
    events = server.stream("/v1/completions", prompt="ab [exhaust]")
    assert events[-1]["error"]["code"] == "overloaded"
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "ab"


def test_a_client_that_leaves_a_stream_stops_its_work(server: Running) -> None:
    body = {"model": MODEL, "prompt": "leaves a stream", "max_tokens": 500, "ignore_eos": True, "stream": True}
    response = server.open("/v1/completions", body)
    response.read(10)
    response.close()
    server.connection.close()
    wait_until(lambda: "leaves a stream" in server.cancelled())


def test_a_client_that_leaves_before_its_answer_stops_its_work(server: Running) -> None:
    body = {"model": MODEL, "prompt": "leaves at once", "max_tokens": 500, "ignore_eos": True}
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("POST", "/v1/completions", json.dumps(body))
    wait_until(lambda: "openvino:requests_running 1\n" in server.send("/metrics")[1])
    connection.close()
    wait_until(lambda: "leaves at once" in server.cancelled())


def test_token_ids_there_and_back_special_ones_included(server: Running) -> None:
    text = "hé字😀"
    status, told = server.send("/tokenize", {"model": MODEL, "prompt": text})
    assert (status, told) == (200, {"count": 10, "max_model_len": MAX_MODEL_LEN, "tokens": list(text.encode())})
    assert server.send("/detokenize", {"tokens": [*told["tokens"], 256]}) == (200, {"prompt": f"{text}<eos>"})
    turns = [{"role": "user", "content": "Hi"}]
    assert server.send("/tokenize", {"messages": turns})[1]["tokens"] == list(b"u:Hi;")


def test_questions_about_tokens_that_make_no_sense_are_refused(server: Running) -> None:
    for path, body, status, param in (
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, 400, "prompt"),
        ("/tokenize", {"model": "other", "prompt": "a"}, 404, "model"),
        ("/detokenize", {"tokens": [257]}, 400, "tokens"),
        ("/detokenize", {"model": "other", "tokens": [1]}, 404, "model"),
    ):
        answered, told = server.send(path, body)
        assert (answered, told["error"]["param"]) == (status, param)


def test_it_tells_the_librarys_version(server: Running) -> None:
    assert server.send("/version") == (200, {"version": "2026.4.1.0-twin"})


def test_it_tells_its_model_and_its_load(server: Running) -> None:
    _, body = server.send("/v1/models")
    assert [(model["id"], model["max_model_len"]) for model in body["data"]] == [(MODEL, MAX_MODEL_LEN)]
    with server.open(
        "/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": 300, "ignore_eos": True, "stream": True}
    ) as response:
        response.read(200)
        busy = Running(server.process, server.port, server.log).send("/metrics")[1]
        response.read()
    server.connection.close()
    assert "openvino:requests_running 1\n" in busy
    assert "openvino:kv_cache_usage 0.125\n" in busy
    assert "openvino:requests_running 0\n" in server.send("/metrics")[1]


def test_a_pipeline_that_crashes_ends_open_streams_with_an_error_and_the_server_with_code_1(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        events = server.stream("/v1/completions", prompt="ab [crash]")
        assert events[-1]["error"]["code"] == "engine_failed"
        assert server.process.wait(10) == 1


def test_a_model_that_cannot_be_loaded_ends_the_server_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    command = [sys.executable, "-m", "adapters.servers.openvino_server", "--model", str(tmp_path / "empty.gguf")]
    command += ["--served-model-name", MODEL, "--port", str(free_port()), "--threads", "1"]
    env = {**os.environ, "PYTHONPATH": f"{TWIN}{os.pathsep}{ROOT}"}
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 1
    assert "the file is not a GGUF" in result.stderr
    assert "error: OpenVINO could not load the model" in result.stderr


# ------------------------------ tools and thoughts

# The twin answers with its prompt, and this template makes that what the last message says.
TEMPLATE = "{{ messages[-1].content }}{% if tools %} ({{ tools | length }}, not <tool_call>){% endif %}{# </think> #}"
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("get_weather", "get_time")]


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose model's template renders tools and knows thoughts."""
    folder = tmp_path_factory.mktemp("taught")
    (folder / "template.jinja").write_text(TEMPLATE)
    with running_server(folder, "--chat-template", str(folder / "template.jinja")) as server:
        yield server


def says(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 400, **fields}


def test_calls_and_thoughts_are_read_out_of_the_text_whole(taught: Running) -> None:
    status, body = taught.send("/v1/chat/completions", says(f"<think>{CALL}?</think>Hm. {CALL}", tools=TOOLS))
    assert status == 200
    (choice,) = body["choices"]
    message = choice["message"]
    assert message["reasoning_content"] == f"{CALL}?"
    assert [each["function"] for each in message["tool_calls"]] == [
        {"name": "get_weather", "arguments": '{"city": "Rome"}'}
    ]
    assert message["content"] == "Hm. (2, not <tool_call>)"  # the template was given both tools
    assert choice["finish_reason"] == "tool_calls"
    assert body["usage"]["completion_tokens"] == body["usage"]["prompt_tokens"] + 1  # every token, shown or not


OPTIONS = {"include_usage": True, "continuous_usage_stats": True}


def test_every_event_counts_the_tokens_so_far_those_of_half_characters_too(server: Running) -> None:
    messages = [{"role": "user", "content": "字😀é"}]
    events = server.stream("/v1/chat/completions", messages=messages, stream_options=OPTIONS)
    assert events.pop() == "[DONE]"
    account = events.pop()["usage"]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts[0] == 0  # the role
    assert counts == sorted(counts)
    assert counts[-1] == account["completion_tokens"]
    said = [
        "".join(event["choices"][0]["delta"].get("content", "") for event in events[: n + 1])
        for n in range(len(events))
    ]
    for text, count in zip(said[1:-1], counts[1:-1], strict=True):
        assert len(text.encode()) == count  # the twin's token is a byte, and no character leaves before its last


def test_calls_and_thoughts_are_counted_as_they_are_streamed(taught: Running) -> None:
    fields = says(f"<think>hm</think>{CALL}{CALL.replace('Rome', 'Oslo')}", tools=TOOLS)
    events = taught.stream("/v1/chat/completions", **fields, stream_options=OPTIONS)
    counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2]


def test_calls_and_thoughts_are_streamed(taught: Running) -> None:
    fields = says(f"<think>hm</think>{CALL}{CALL.replace('Rome', 'Oslo')}", tools=TOOLS)
    events = taught.stream("/v1/chat/completions", **fields, stream_options={"include_usage": True})
    assert events.pop() == "[DONE]"
    usage = events.pop()["usage"]
    assert usage["completion_tokens"] == usage["prompt_tokens"] + 1
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["index"] for call in calls if "id" in call] == [0, 1]
    arguments = ["".join(c["function"]["arguments"] for c in calls if c["index"] == at) for at in (0, 1)]
    assert [json.loads(each) for each in arguments] == [{"city": "Rome"}, {"city": "Oslo"}]
    assert [event["choices"][0]["finish_reason"] for event in events[-1:]] == ["tool_calls"]


def test_where_one_call_is_wanted_the_work_stops_after_it(taught: Running) -> None:
    text = f"{CALL} and then a long tail"
    _, body = taught.send("/v1/chat/completions", says(text, tools=TOOLS, parallel_tool_calls=False))
    assert len(body["choices"][0]["message"]["tool_calls"]) == 1
    assert body["choices"][0]["message"]["content"] is None
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    assert body["usage"]["completion_tokens"] < len(text)
    wait_until(lambda: any(line.startswith(text) for line in taught.cancelled()))


def test_without_tools_in_the_request_a_call_is_text(taught: Running) -> None:
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        _, body = taught.send("/v1/chat/completions", says(CALL, **fields))
        assert body["choices"][0]["message"]["content"] == CALL


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_time"}}])
def test_a_call_cannot_be_forced(taught: Running, choice: Any) -> None:
    status, body = taught.send("/v1/chat/completions", says("x", tools=TOOLS, tool_choice=choice))
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, "unsupported_parameter", "tool_choice")


def test_images_and_tools_that_the_template_does_not_render_are_refused(server: Running) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    for path in ("/v1/chat/completions", "/tokenize"):
        body = {"model": MODEL, "messages": [{"role": "user", "content": [image]}]}
        status, told = server.send(path, body)
        assert (status, told["error"]["param"]) == (400, "messages")
    status, told = server.send("/v1/chat/completions", says("x", tools=TOOLS))
    assert (status, told["error"]["code"], told["error"]["param"]) == (400, "unsupported_parameter", "tools")


async def test_the_adapter_offers_tools_where_the_servers_model_has_them(server: Running, taught: Running) -> None:
    for running, has_tools in ((server, False), (taught, True)):
        adapter = Adapter(HTTPOptions(url=f"http://127.0.0.1:{running.port}"))
        await adapter.start()
        try:
            assert [each.max_model_len for each in await adapter.models()] == [MAX_MODEL_LEN]
            assert ("tools" in adapter.capabilities.parameters) is has_tools
            request = decode_chat(json.dumps(says(f"<think>hm</think>{CALL}", tools=TOOLS)).encode())
            if not has_tools:
                with pytest.raises(UnsupportedParameter, match="tools"):
                    await collect(adapter, request)
                continue
            chunks = await collect(adapter, request)
            assert "".join(chunk.reasoning for chunk in chunks) == "hm"
            assert told(chunks).calls == [ROME]
            assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["tool_calls"]
            forced = decode_chat(json.dumps(says(CALL, tools=TOOLS, tool_choice="required")).encode())
            with pytest.raises(UnsupportedParameter, match="tool_choice"):
                await collect(adapter, forced)
        finally:
            await adapter.close()


def test_choices_get_seeds_that_differ_and_repeat() -> None:
    body = decode_completion(b'{"model": "m", "prompt": "x", "n": 3, "seed": -1, "top_k": -1, "temperature": 0.5}')
    jobs = make_jobs(body, [1, 2], 100)
    assert [job.seed for job in jobs] == [2**64 - 1, 0, 1]
    assert {(job.top_k, job.temperature, job.max_tokens) for job in jobs} == {(0, 0.5, 16)}


def test_requests_without_a_seed_do_not_share_one() -> None:
    body = decode_completion(b'{"model": "m", "prompt": "x"}')
    assert make_jobs(body, [1], 100)[0].seed != make_jobs(body, [1], 100)[0].seed


def test_a_prompt_that_leaves_no_room_is_refused_with_its_length() -> None:
    body = decode_completion(b'{"model": "m", "prompt": "x", "max_tokens": 5}')
    assert make_jobs(body, [7] * 5, 10)[0].max_tokens == 5
    with pytest.raises(ContextLengthExceeded, match="6 tokens and 5 were asked for"):
        make_jobs(body, [7] * 6, 10)
    with pytest.raises(InvalidRequest, match="empty"):
        make_jobs(body, [], 10)


BYTES = [bytes([value]) for value in range(256)]


@given(
    text=st.text(alphabet="abé字😀", max_size=30),
    stops=st.lists(st.text(alphabet="abé字", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(1, 5), min_size=1, max_size=60),
)
def test_streamed_text_is_the_whole_text_up_to_its_first_stop_string(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    stream, data, sent = TextStream(BYTES, stops), list(text.encode()), ""
    position = 0
    for cut in [*cuts, len(data)]:
        if not stream.stopped:
            sent += stream.feed(data[position : position + cut])
            position += cut
    sent += stream.close()
    if stream.stopped:
        assert text.startswith(sent)
        assert any(text[len(sent) :].startswith(stop) for stop in stops)
    else:
        assert not any(stop in text for stop in stops)
        assert sent == text


def test_a_min_p_of_one_was_refused_by_the_library_so_it_gets_the_next_smaller_one() -> None:
    job = Job(prompt_ids=[1], max_tokens=1, temperature=1.0, min_p=1.0)
    assert 0.999 < generation_config(SimpleNamespace(), job).min_p < 1
    assert generation_config(SimpleNamespace(), msgspec.structs.replace(job, min_p=0.1)).min_p == 0.1
