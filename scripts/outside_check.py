"""Our figures beside those of other load generators, for the same engine: writes the tables of docs/outside-check.md.

python scripts/outside_check.py --write docs/outside-check.md     # about fifteen minutes on two cores
python scripts/outside_check.py --only real --engine native --tools GuideLLM     # a part of it

Needs the default model (`goodgate models pull`) and vLLM (`goodgate engines install vllm`), whose `bench serve` is one
of them. The others it installs by itself: about 6 GB. Nothing is fetched while it measures.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from adapters.config import goodgate_home  # noqa: E402
from adapters.errors import GoodgateError  # noqa: E402
from adapters.launching.launch import launch  # noqa: E402
from adapters.marked_page import placed  # noqa: E402
from adapters.models.model_store import DEFAULT_MODEL, ModelStore  # noqa: E402
from arena.load import scripted_engine  # noqa: E402
from arena.load.plan import Prompt  # noqa: E402
from arena.outside.comparison import CASES, OURS, Bench, against_engine, against_truth, table  # noqa: E402
from arena.outside.tools import TOOLS, Tool  # noqa: E402
from arena.race.probe import probe, warm_up  # noqa: E402

RATE_RPS, OUTPUT_TOKENS = 1.0, 32  # of the real engine: far below what two cores carry, so that no queue is measured
WARM_UP_REQUESTS = 8


def main() -> None:
    options = read_options()
    home = goodgate_home()
    tools = [tool for tool in TOOLS if options.tools is None or tool.name in options.tools.split(",")]
    try:
        for tool in tools:
            tool.install(home, say)
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(
                home=home,
                folder=Path(folder),
                tokenizer=ModelStore(home).hf_folder(DEFAULT_MODEL),
                rounds=options.rounds,
                requests=options.requests,
                say=say,
            )
            if options.only != "real":
                show(options.write, "outside-scripted", "\n\n".join(scripted(tools, bench)))
            if options.only != "scripted":
                show(options.write, "outside-real", asyncio.run(real(options.engine, tools, bench)))
    except GoodgateError as error:
        sys.exit(f"outside_check: {error.message}")


def show(page: Path | None, place: str, text: str) -> None:
    """Print it, and put it into the page as soon as it is known: what comes later may fail."""
    print(text, flush=True)
    if page is not None:
        page.write_text(placed(page.read_text(), place, text))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the tables into this page, between its marks")
    parser.add_argument("--rounds", type=int, default=2, help="each tool measures so often, in alternating order")
    parser.add_argument("--requests", type=int, default=60, help="requests of one run")
    parser.add_argument("--engine", default="openvino", help="the real engine, which is started here")
    parser.add_argument("--only", choices=["scripted", "real"], help="this one of the two parts")
    names = ",".join(tool.name for tool in TOOLS)
    parser.add_argument("--tools", help=f"only these, with commas between: {names}")
    return parser.parse_args()


def scripted(tools: list[Tool], bench: Bench) -> Iterator[str]:
    yield f"{bench.requests} requests a run, 10 a second, {times(bench.rounds)}."
    with scripted_engine.running() as engine:
        for case in CASES:
            yield f"{case.title}:\n\n{table(against_truth(engine, case, tools, bench), versions(tools))}"


async def real(name: str, tools: list[Tool], bench: Bench) -> str:
    async with launch(name, home=bench.home, model_name=DEFAULT_MODEL) as process:
        found = await probe(process.url, model=None, prompt=prompt(0))
        await warm_up(found.target(name), prompt, WARM_UP_REQUESTS, timeout_s=120)
        runs = await asyncio.to_thread(
            against_engine, process.url, found.model, tools, bench, rate_rps=RATE_RPS, tokens=OUTPUT_TOKENS
        )
    return (
        f"The engine is `{name}`: {bench.requests} requests a run, {RATE_RPS:g} a second, prompts of 121 words, "
        f"{OUTPUT_TOKENS} output tokens, {times(bench.rounds)}. What ours stamped stands for the truth.\n\n"
        f"{table(runs, versions(tools))}"
    )


def prompt(seq: int) -> Prompt:
    return Prompt(str(seq), {"messages": [{"role": "user", "content": f"{seq} warm " * 60}]}, OUTPUT_TOKENS)


def versions(tools: list[Tool]) -> dict[str, str]:
    return {OURS: "", **{tool.name: tool.version for tool in tools}}


def times(rounds: int) -> str:
    return "one run each" if rounds == 1 else f"{rounds} runs each in alternating order, medians"


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
