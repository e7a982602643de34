"""Who races: engines that are started here, and endpoints that run already, out of the words of the command line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import msgspec
import typer
from msgspec import Meta

from adapters.config import goodgate_home, variable
from adapters.errors import InvalidRequest
from adapters.option_errors import read_options
from adapters.registry import adapter_class
from adapters.yaml_text import YamlError, read_yaml
from arena.commands.common import Misuse

if TYPE_CHECKING:
    from adapters.launching.launch import EngineProcess
    from arena.race.card import Contender
    from arena.race.scenario import Scenario

EngineOption = Annotated[
    list[str] | None, typer.Option("--option", "-o", help="A launch option, as engine.key=value; can be repeated.")
]


def contenders_of(
    scenario: Scenario, engines: str | None, targets: list[str], options: list[str], key: str | None
) -> list[Contender]:
    """Those that the command line names; without any, those of the scenario; without any, all that are installed."""
    contenders = endpoints(targets, key)
    chosen = engine_options(options)
    for engine in scenario.options:
        adapter_class(engine)  # options for an engine that does not exist are a typing error
    if engines is not None or not contenders:
        wanted = names_in(engines) if engines is not None else list(scenario.engines)
        contenders = launched(wanted, scenario.model, merged(scenario.options, chosen)) + contenders
    refuse_idle_options(chosen, contenders)
    refuse_duplicates([contender.name for contender in contenders])
    refuse_restarts(scenario, contenders)
    return contenders


def launched(names: list[str], model: str, options: Mapping[str, Mapping[str, Any]]) -> list[Contender]:
    """Contenders that we start, each with its launch options: the named ones, or all that are installed."""
    from adapters.models.model_store import ModelMissing, ModelStore
    from arena.race.card import Contender
    from arena.race.config import installations

    home = goodgate_home()
    known = installations(home)
    for name in names:
        adapter_class(name)  # an unknown name is told before one that only cannot be started
        if name not in known:
            raise Misuse(
                f"The engine {name!r} cannot be started from here; start it yourself and use --targets {name}=URL."
            )
        if not known[name].available:
            raise Misuse(f"The engine {name!r} is not installed: {known[name].how.rstrip('.')}.")
    chosen = names or [name for name, installation in known.items() if installation.available]
    if not chosen:
        raise Misuse(
            "No engine is installed here; run `goodgate engines install llama_cpp`, or use --targets name=url."
        )
    try:
        for name in chosen:
            _refuse_wrong_options(name, options.get(name, {}))
        ModelStore(home).get(model)
    except (ModelMissing, InvalidRequest) as error:
        raise Misuse(error.message) from error
    return [
        Contender(
            name=name,
            version=known[name].version or None,
            process=partial(_process, name, home, model, options.get(name, {})),
            flags=options.get(name, {}),
        )
        for name in chosen
    ]


def _refuse_wrong_options(name: str, options: Mapping[str, Any]) -> None:
    """Now, and not when its turn in the race has come."""
    from adapters.launching.launch import Launchable

    adapter = adapter_class(name)
    if issubclass(adapter, Launchable):
        read_options(options, adapter.launch_options(), name, "launch option")


def engine_options(values: list[str]) -> dict[str, dict[str, Any]]:
    """`["llama_cpp.quantization=q8_0"]` -> `{"llama_cpp": {"quantization": "q8_0"}}`; values are YAML scalars."""
    options: dict[str, dict[str, Any]] = {}
    for value in values:
        place, equals, setting = value.partition("=")
        engine, dot, key = place.partition(".")
        if not (engine and dot and key and equals):
            raise Misuse(f"--option {value!r} is not of the form engine.key=value.")
        adapter_class(engine)
        try:
            options.setdefault(engine, {})[key] = read_yaml(setting)
        except YamlError as error:
            raise Misuse(f"--option {value!r}: the value is not a YAML scalar.") from error
    return options


def merged(
    base: Mapping[str, Mapping[str, Any]], over: Mapping[str, Mapping[str, Any]]
) -> dict[str, Mapping[str, Any]]:
    """Option by option: one from the command line leaves the scenario's others of that engine as they are."""
    return {engine: {**base.get(engine, {}), **over.get(engine, {})} for engine in [*base, *over]}


def priced(scenario: Scenario, prices: list[str], contenders: list[str]) -> Scenario:
    """The scenario with the prices of the command line over its own: `["vllm=2.5"]`, in its currency, by the hour."""
    from arena.race.scenario import Cost

    if not prices:
        return scenario
    own = scenario.cost.per_hour if scenario.cost else {}
    by_engine = dict(own) if isinstance(own, dict) else dict.fromkeys(contenders, own)
    for value in prices:
        engine, _, price = value.partition("=")
        if engine not in contenders:
            raise Misuse(f"--price {value!r}: {engine!r} does not take part; {', '.join(contenders)} do.")
        try:
            by_engine[engine] = msgspec.convert(price, Annotated[float, Meta(ge=0, le=1_000_000)], strict=False)
        except msgspec.ValidationError as error:
            raise Misuse(f"--price {value!r} is not of the form engine=2.5.") from error
    cost = msgspec.structs.replace(scenario.cost or Cost(per_hour={}), per_hour=by_engine)
    return msgspec.structs.replace(scenario, cost=cost)


def refuse_idle_options(options: Mapping[str, Mapping[str, Any]], contenders: list[Contender]) -> None:
    started = {contender.name for contender in contenders if contender.process is not None}
    for engine in options:
        if engine not in started:
            raise Misuse(f"--option {engine}.{next(iter(options[engine]))}: this command does not start {engine!r}.")


def refuse_restarts(scenario: Scenario, contenders: list[Contender]) -> None:
    for contender in contenders:
        if scenario.restart != "never" and contender.process is None:
            raise Misuse(
                f"The scenario asks for `restart: {scenario.restart}`, and {contender.name!r} is an endpoint that only "
                "you can restart; start it by --engines, or set `restart: never`."
            )


def api_key(name: str) -> str:
    key = variable(name)
    if not re.fullmatch(r"[\x21-\x7e]+", key):
        raise Misuse(f"--api-key-env: the variable {name} holds no key.")
    return key


def endpoints(values: list[str], key: str | None) -> list[Contender]:
    from arena.race.card import Contender

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    contenders = []
    for value in ",".join(values).split(","):
        if not value:
            continue
        name, _, address = value.partition("=")
        url, _, model = address.partition("@")
        if not name or not re.match(r"https?://[^/]", url):
            raise Misuse(f"--targets {value!r} is not of the form name=http://host:port[@model].")
        if url.startswith("https:"):
            raise Misuse(
                f"--targets {value!r}: the arena measures plain http:// only; put a proxy that ends TLS before it."
            )
        if fault := _fault_of(url, address):
            raise Misuse(f"--targets {value!r}: {fault}")
        base = url.rstrip("/").removesuffix("/v1")
        contenders.append(Contender(name=name, url=base, model=model or None, headers=headers))
    if values and not contenders:
        raise Misuse("--targets names no endpoint; give it name=http://host:port, or leave it out.")
    return contenders


def _fault_of(url: str, address: str) -> str | None:
    """Why nothing could be sent there, found out before anything is started or measured."""
    try:
        parts = urlsplit(url)
        port, host = parts.port, (parts.hostname or "").encode("idna")
    except (ValueError, UnicodeError):
        port, host = 0, b""
    if port == 0 or not re.fullmatch(rb"[\w.:%-]+", host):
        return "that is no address; write it as http://host:port."
    if parts.username is not None or parts.query or parts.fragment:
        return "give only host, port and path; a key goes into --api-key-env."
    if "@" in address and not re.fullmatch(r"[^\s@\x00-\x1f\x7f]+", address.partition("@")[2]):
        return "what follows the @ is the name of a model, and that is none."
    return None


def names_in(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise Misuse("--engines names no engine; give it names with commas between, or leave it out.")
    return names


def controlled(scenario: Scenario, asked: str | None, names: list[str]) -> str | None:
    """Who is entered twice: whom --control names, else the first contender where the scenario has the control."""
    if asked is None:
        return names[0] if scenario.control == "aa" else None
    if asked not in names:
        raise Misuse(f"--control {asked!r}: nobody of that name races; choose one of {', '.join(names)}.")
    return asked


def refuse_duplicates(names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise Misuse(f"Two contenders are called {name!r}; give each its own name (--targets other-name=url).")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name):
            raise Misuse(f"A contender cannot be called {name!r}; use letters, digits, dots, dashes and underscores.")


def _process(name: str, home: Path, model: str, options: Mapping[str, Any]) -> EngineProcess:
    from adapters.launching.launch import launch

    return launch(name, home=home, model_name=model, options=options)
