"""What is asked of an engine beside speed, and who cannot give it. Pure: facts about engines go in.

unmet(Needs(capabilities=("response_format",), air_gapped=True), facts)      # a sentence for each that is not met
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec import Struct

# Words that people use, and what the capability matrix calls it.
ALIASES = {
    "structured_output": "response_format",
    "json": "response_format",
    "images": "parts",
    "tool_calls": "tools",
    "reasoning": "reasoning_effort",
}


class EngineFacts(Struct, frozen=True, kw_only=True):
    """What is known of an engine from its adapter. Empty `licence` and `hardware`: not known."""

    engine: str
    licence: str  # SPDX id of the engine's code; a model has its own
    hardware: frozenset[str]  # cpu, cuda, rocm, ...
    hosted: bool | None  # None: it depends on where its url leads
    offers: Mapping[str, str]  # by capability: yes, opt or -
    options: tuple[str, ...]  # that widen the offer


class Needs(Struct, frozen=True, kw_only=True):
    capabilities: tuple[str, ...] = ()
    air_gapped: bool = False
    hardware: str = ""
    licences: tuple[str, ...] = ()

    @property
    def are_any(self) -> bool:
        return self != Needs()


def unmet(needs: Needs, facts: EngineFacts, *, host_gpu: str) -> Iterator[str]:
    """`host_gpu` is the graphics card of the machine that the evidence comes from; empty where it had none."""
    for capability in needs.capabilities:
        if facts.offers.get(capability, "-") == "-":
            yield f"{facts.engine} does not offer `{capability}`."
    if needs.air_gapped and facts.hosted:
        yield f"{facts.engine} runs at a provider's, and nothing may leave the site."
    if needs.air_gapped and facts.hosted is None:
        yield f"Where {facts.engine} runs depends on its url, so it cannot be promised that nothing leaves the site."
    yield from _unmet_licence(needs, facts)
    yield from _unmet_hardware(needs, facts, host_gpu)


def remarks(needs: Needs, facts: EngineFacts) -> Iterator[str]:
    for capability in needs.capabilities:
        if facts.offers.get(capability) == "opt":
            yield f"`{capability}` needs an option of {facts.engine}: one of {', '.join(facts.options)}."


def _unmet_licence(needs: Needs, facts: EngineFacts) -> Iterator[str]:
    if needs.licences and not facts.licence:
        yield f"The licence of {facts.engine} is not known here."
    elif needs.licences and facts.licence not in needs.licences:
        yield f"{facts.engine} has the licence {facts.licence}, and {' or '.join(needs.licences)} is asked for."


def _unmet_hardware(needs: Needs, facts: EngineFacts, host_gpu: str) -> Iterator[str]:
    if not needs.hardware:
        return
    if not facts.hardware:
        yield f"It is not known what hardware {facts.engine} runs on."
    elif needs.hardware not in facts.hardware:
        yield f"{facts.engine} runs on {', '.join(sorted(facts.hardware))}, and not on {needs.hardware}."
    elif needs.hardware == "cpu" and host_gpu:
        yield f"The race ran on a machine with a card ({host_gpu}), which says nothing of a processor alone."
    elif needs.hardware != "cpu" and not host_gpu:
        yield f"The race ran on a processor, which says nothing of {needs.hardware}."
