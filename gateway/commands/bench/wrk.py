"""wrk and nginx: the load, and an upstream that answers at once.

with nginx(upstream_conf(port), folder) as process: timing = wrk(target, 16, seconds=5, folder=folder)
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct

from gateway.commands.bench.peers import ROUTE, Target, chat_body
from gateway.commands.bench.processes import BenchError, cpu_s, running

WORDS = "The quick brown fox jumps over the lazy dog, and then it sleeps under the old tree until the evening comes. "
ANSWER = (
    '{"id":"chatcmpl-1","object":"chat.completion","created":1796000000,"model":"m","choices":[{"index":0,"message":'
    f'{{"role":"assistant","content":"{(WORDS * 2)[:190]}"}},"logprobs":null,"finish_reason":"stop"}}],"usage":'
    '{"prompt_tokens":80,"completion_tokens":42,"total_tokens":122,"prompt_tokens_details":{"cached_tokens":64}}}'
)
MODELS = '{"object":"list","data":[{"id":"m","object":"model"}]}'
UNIT_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}


class Timing(Struct, frozen=True):
    """Of whole requests; `cpu_us` is the CPU time of the target for each."""

    p50_ms: float
    rps: float
    cpu_us: float


def need(program: str) -> str:
    found = shutil.which(program) or shutil.which(program, path="/usr/sbin:/usr/local/sbin")
    if found is None:
        raise BenchError(f"{program} is missing; on Debian or Ubuntu: apt-get install {program}")
    return found


def upstream_conf(port: int) -> str:
    """An engine that answers each chat with the same 500 bytes."""
    json_answer = "default_type application/json; return 200"
    return (
        f"server {{ listen 127.0.0.1:{port} backlog=1024;\n"
        f"location = {ROUTE} {{ {json_answer} '{ANSWER}'; }}\n"
        f"location = /v1/models {{ {json_answer} '{MODELS}'; }}\n"
        "location / { default_type application/json; return 200 '{}'; } }"
    )


def proxy_conf(port: int, upstream: int) -> str:
    return (
        f"upstream engine {{ server 127.0.0.1:{upstream}; keepalive 64; keepalive_requests 100000000; }}\n"
        f"server {{ listen 127.0.0.1:{port} backlog=1024;\n"
        'location / { proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection ""; } }'
    )


@contextmanager
def nginx(servers: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    folder.mkdir()
    scratch = " ".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    conf = folder / "nginx.conf"
    conf.write_text(
        f"daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log;\n"
        "events { worker_connections 1024; }\n"
        f"http {{ access_log off; {scratch} keepalive_requests 100000000; keepalive_timeout 600;\n{servers} }}\n"
    )
    with running([need("nginx"), "-p", str(folder), "-c", str(conf)], stderr=subprocess.DEVNULL) as process:
        yield process


def wrk(target: Target, connections: int, seconds: float, folder: Path) -> Timing:
    headers = {"Content-Type": "application/json", **target.headers}
    script = folder / "post.lua"
    script.write_text(
        f"wrk.method = 'POST'\nwrk.body = '{chat_body().decode()}'\n"
        + "".join(f"wrk.headers['{name}'] = '{value}'\n" for name, value in headers.items())
    )
    url = f"http://127.0.0.1:{target.port}{ROUTE}"
    command = [need("wrk"), "-t1", f"-c{connections}", f"-d{seconds:g}s", "--latency", "-s", str(script), url]
    before = cpu_s(target.pid)
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return timing_of(told, target.name, cpu_s(target.pid) - before)


def timing_of(told: str, name: str, cpu: float) -> Timing:
    """What wrk has printed. Pure."""
    if failed := re.search(r"Non-2xx.*|Socket errors.*", told):
        raise BenchError(f"{name} failed under load: {failed[0]}")
    number = re.search(r"(\d+) requests in", told)
    p50 = re.search(r"50%\s+([\d.]+)(us|ms|s)", told)
    rate = re.search(r"Requests/sec:\s+([\d.]+)", told)
    if number is None or p50 is None or rate is None or not int(number[1]):
        raise BenchError(f"{name} answered nothing; wrk said: {told}")
    return Timing(float(p50[1]) * UNIT_MS[p50[2]], float(rate[1]), cpu / int(number[1]) * 1e6)
