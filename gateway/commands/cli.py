"""The gateway's commands: `goodgate serve`, `reload`, `chat`, `doctor`, `prefixes`.

This module reads the command line, files and the environment, and hands values to the rest.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec
import typer

from adapters.config import goodgate_home
from adapters.errors import GoodgateError
from gateway.config import Config, ConfigError, describe
from gateway.reload.source import ConfigSource, Reading
from gateway.tenants.auth import check_exposure
from gateway.tenants.keys import KeyStore

DEFAULT_CONFIG = "configs/local.yaml"
DEFAULT_URL = "http://127.0.0.1:8080"

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def default_config() -> Path:
    """The working folder's configuration, or the one that lies beside Goodgate's code or was installed with it."""
    folders = [Path(), Path(__file__).parents[2], Path(sys.prefix) / "share" / "goodgate"]
    return next((path for folder in folders if (path := folder / DEFAULT_CONFIG).exists()), Path(DEFAULT_CONFIG))


ConfigPath = Annotated[
    Path,
    typer.Option(
        "--config", default_factory=default_config, show_default=DEFAULT_CONFIG, help="The configuration file."
    ),
]


@app.command(epilog="Example: goodgate serve --config configs/local.yaml --port 8080")
def serve(
    config_path: ConfigPath,
    host: Annotated[str | None, typer.Option(help="Listen on this address instead of the file's.")] = None,
    port: Annotated[
        int | None, typer.Option(help="Listen on this port instead of the file's.", min=0, max=65535)
    ] = None,
    is_open: Annotated[
        bool, typer.Option("--open", help="Serve whoever reaches the address, while no API key was ever made.")
    ] = False,
    workers: Annotated[int, typer.Option(help="Serving processes that share the port.", min=1, max=64)] = 1,
    check_config: Annotated[bool, typer.Option("--check-config", help="Check the configuration and stop.")] = False,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print what it resolves to and stop.")] = False,
) -> None:
    """Serve the configured models on an OpenAI-compatible endpoint."""
    try:
        source = ConfigSource(config_path, host, port, is_open, workers)
        reading = source.read()
        if print_config:
            typer.echo(describe(reading.config), nl=False)
        if check_config:
            typer.echo(f"{config_path} is valid.", err=True)
        if not (print_config or check_config):
            _serve(reading, source)
    except ConfigError as error:
        _fail(error.message, code=2)
    except GoodgateError as error:
        _fail(error.message)


@app.command(epilog="Example: GOODGATE_API_KEY=gg-... goodgate reload")
def reload(
    url: Annotated[str, typer.Option(help="The gateway's address.")] = DEFAULT_URL,
) -> None:
    """Have a running gateway read its configuration again, and say what has changed.

    Where the gateway wants keys, GOODGATE_API_KEY is an admin's.
    """
    from gateway.commands.chat import NO_GATEWAY, fetch
    from gateway.reload.reloader import Outcome, lines

    try:
        body = fetch(url, "/admin/reload", method="POST", key=os.environ.get("GOODGATE_API_KEY", ""))
        outcome = msgspec.json.decode(body, type=Outcome)
    except GoodgateError as error:
        _fail(error.message)
    except msgspec.MsgspecError:
        _fail(NO_GATEWAY)
    for line in lines(outcome):
        typer.echo(line)


@app.command(epilog="Example: goodgate chat 'Why is the sky blue?'")
def chat(
    prompt: Annotated[str, typer.Argument(help="What to ask.")],
    url: Annotated[str, typer.Option(help="The gateway's address.")] = DEFAULT_URL,
    model: Annotated[str | None, typer.Option(help="The model's name; default: the first one served.")] = None,
    max_tokens: Annotated[int, typer.Option(help="The longest answer.", min=1)] = 512,
    temperature: Annotated[
        float | None,
        typer.Option(help="0 is greedy; by default 0.2, because small models ramble above 0.3.", min=0, max=2),
    ] = None,
) -> None:
    """Ask a running gateway and print the answer as it comes.

    Its API key, if it wants one, is in GOODGATE_API_KEY."""
    from gateway.commands.chat import stream_answer

    key = os.environ.get("GOODGATE_API_KEY", "")
    answer = stream_answer(url, prompt, model=model, max_tokens=max_tokens, temperature=temperature, key=key)
    try:
        for piece in answer:
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")
    except GoodgateError as error:
        _fail(error.message)


@app.command(epilog="Example: goodgate doctor --config configs/local.yaml")
def doctor(
    config_path: ConfigPath,
) -> None:
    """Check what serving needs on this machine, and say what to do where it is missing."""
    from gateway.commands.doctor import examine

    is_healthy = True
    for finding in examine(config_path, goodgate_home()):
        typer.echo(f"{finding.mark}  {finding.subject}: {finding.state}")
        if finding.advice:
            typer.echo(f"      {finding.advice}")
        is_healthy = is_healthy and not finding.is_failure
    if not is_healthy:
        raise typer.Exit(1)


@app.command(epilog="Example: GOODGATE_API_KEY=gg-... goodgate prefixes")
def prefixes(
    url: Annotated[str, typer.Option(help="The gateway's address.")] = DEFAULT_URL,
    as_json: Annotated[bool, typer.Option("--json", help="The report as JSON.")] = False,
) -> None:
    """Show how much of their prompts tenants get from prefix caches, and what they could change to get more.

    Where the gateway wants keys, GOODGATE_API_KEY is an admin's.
    """
    from gateway.commands.chat import fetch
    from gateway.records.prefixes import Report, lines

    try:
        body = fetch(url, "/admin/prefixes", key=os.environ.get("GOODGATE_API_KEY", ""))
        report = msgspec.json.decode(body, type=Report)
    except GoodgateError as error:
        _fail(error.message)
    except msgspec.MsgspecError:
        _fail(f"What answers on {url} is no Goodgate; name the gateway's address with --url.")
    if as_json:
        typer.echo(body)
        return
    for line in lines(report):
        typer.echo(line)


def serve_process(reading: Reading, source: ConfigSource, home: Path, share_port: bool) -> None:
    """One serving process, from its socket to the end of draining."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until it has a handler, one would end us instead of a second reading
    config = reading.config
    import uvloop

    from gateway.app import create_app
    from gateway.records import logs
    from gateway.web import process
    from gateway.web.server import listen, serve_until_signal

    logs.configure(config.logs)
    files, wanted = process.raise_files_limit(), process.files_wanted(config.server.max_in_flight)
    if files is not None and files < wanted:
        log = logs.logger("overload")
        logs.warning(log, "few files may be open: raise the limit (ulimit -n)", files=files, wanted=wanted)
    sock = listen(config.server.host, config.server.port, share=share_port)

    def say_listening() -> None:
        host, port = sock.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        # In one write, or two workers' lines run into each other: print writes the text and the line's end apart.
        sys.stderr.write(f"Goodgate listens on http://{shown}:{port}\n")
        sys.stderr.flush()

    async def main() -> None:
        application = create_app(config, home=home, source=source, digest=reading.digest)
        await serve_until_signal(application, sock, say_listening)

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
    finally:
        sock.close()


def serve_as_worker(reading: Reading, source: ConfigSource, home: Path) -> None:
    """The entry of one of several processes that share the port."""
    from gateway.web.workers import stop_with_parent

    stop_with_parent()
    try:
        serve_process(reading, source, home, share_port=True)
    except GoodgateError as error:
        print(error.message, file=sys.stderr, flush=True)
        sys.exit(1)


def _serve(reading: Reading, source: ConfigSource) -> None:
    config, home = reading.config, goodgate_home()
    check_exposure(config, has_keys=config.auth.required == "auto" and bool(KeyStore(home).all()))
    if source.num_workers == 1:
        serve_process(reading, source, home, share_port=False)
        return
    from gateway.web import workers
    from gateway.web.server import listen

    if config.server.port == 0:
        raise ConfigError("Several workers need a fixed port: port 0 would give each worker its own.")
    listen(config.server.host, config.server.port).close()  # SO_REUSEPORT would join whatever else shares the port

    def patience_s() -> float:
        """How long a worker may take to end, by the configuration of that time."""
        with suppress(ConfigError):
            return _drain_s(source.read().config)
        return _drain_s(config)

    if not workers.run_workers(source.num_workers, serve_as_worker, (reading, source, home), patience_s):
        _fail("A worker ended on its own; its reason stands above, and the others were stopped.")


def _drain_s(config: Config) -> float:
    return config.server.drain_delay_s + config.server.drain_timeout_s


def _fail(message: str, code: int = 1) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(code)
