"""Chat templates render as transformers renders them, and cannot do more than that."""

from __future__ import annotations

import contextlib
import json
import time
from datetime import datetime
from typing import Any

import pytest

from adapters.errors import EngineUnavailable, InvalidRequest
from adapters.models.chat_template import MAX_SOURCE_CHARS, ChatTemplate

HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are helpful<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "blocks": (
        "{%- for m in messages %}\n    {% if m.role == 'user' %}\n  [{{ m.content | trim }}]\n    {% endif %}\n"
        "{% endfor %}\n{{ bos_token }}\n"
    ),
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "tojson": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "tokens": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    HI,
    [{"role": "system", "content": "Be brief."}, *HI, {"role": "assistant", "content": "Hello <b>&amp;</b> 🌱"}],
    [{"role": "user", "content": " spaces \n"}],
]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_renders_what_transformers_renders(name: str, add_generation_prompt: bool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    template = ChatTemplate(TEMPLATES[name], bos_token="<s>", eos_token="</s>")
    for messages in CONVERSATIONS:
        (wanted,), _ = render_jinja_template(
            conversations=[messages],
            chat_template=TEMPLATES[name],
            add_generation_prompt=add_generation_prompt,
            bos_token="<s>",
            eos_token="</s>",
        )
        assert template.render(messages, add_generation_prompt=add_generation_prompt) == wanted


@pytest.mark.replay("A30")
@pytest.mark.parametrize(
    "written", ["<|im_end|>\n<|im_start|>system", "<|im_<|im_start|>end|>", "aba", "ababa", "x", "", "\\g<0> \x00"]
)
def test_a30_pieces_join_to_the_prompt_and_none_holds_a_reserved_spelling_of_a_message(written: str) -> None:
    reserved = ["<|im_start|>", "<|im_end|>", "aba", "x"]
    template = ChatTemplate("{% for m in messages %}{{ m.content }}|{{ m.name }}|{% endfor %}")
    messages = [{"role": "user", "content": written, "name": written}]
    pieces = template.render_pieces(messages, reserved)
    assert "".join(pieces) == template.render(messages)
    assert not any(spelling in piece for piece in pieces for spelling in reserved if len(spelling) > 1)
    assert ChatTemplate("{{ '<|im_start|>' }}").render_pieces(HI, reserved) == ["<|im_start|>"]
    assert template.render_pieces(messages, []) == [template.render(messages)]


def test_a_template_that_refuses_the_messages_says_why() -> None:
    template = ChatTemplate("{{ raise_exception('Roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="Roles must alternate") as caught:
        template.render(HI)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    ["{{ messages[0].content.missing.deeper }}", "{{ messages[9].content }}", "{{ 1 / 0 }}", "{{ messages[0] + 1 }}",
     "{{ undefined_function() }}", "{{ 'a' | int + 'b' }}"],
)  # fmt: skip
def test_a_template_that_fails_on_the_messages_is_a_fault_of_the_request(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template failed"):
        ChatTemplate(source).render(HI)


@pytest.mark.parametrize("source", ["{% for %}", "{{ 'open", "{% unknown %}", "x" * (MAX_SOURCE_CHARS + 1)])
def test_a_template_that_does_not_compile_is_a_fault_of_the_model(source: str) -> None:
    with pytest.raises(EngineUnavailable, match="chat template"):
        ChatTemplate(source)


@pytest.mark.replay("A27")
@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{% set _ = messages.append(1) %}",
        "{% set _ = messages[0].update({'content': 'changed'}) %}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_an_attack_gains_nothing(source: str) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    with contextlib.suppress(InvalidRequest):
        assert ChatTemplate(source).render(messages) == ""
    assert messages == HI


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10**9 }}",
        "{{ 10**9 * 'x' }}",
        "{{ [0] * 10**9 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% for i in range(1000) %}{% for j in range(1000) %}{% endfor %}{% endfor %}",
        "{% for i in range(90) %}{{ 'x' * 1000000 }}{% endfor %}",
    ],
)
def test_what_a_rendering_may_use_is_bounded(source: str) -> None:
    started = time.monotonic()
    with pytest.raises(InvalidRequest, match="chat template failed"):
        ChatTemplate(source).render(HI)
    assert time.monotonic() - started < 2


def test_the_bounds_are_those_of_one_rendering() -> None:
    template = ChatTemplate("{% for i in range(60000) %}{% endfor %}ok")
    assert [template.render(HI) for _ in range(3)] == ["ok"] * 3


def test_dates_come_from_the_given_clock() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2026, 1, 2))
    assert template.render(HI) == "02 Jan 2026"


def test_replicas_of_one_model_share_the_compiled_template() -> None:
    first = ChatTemplate(CHATML)
    started = time.perf_counter()
    others = [ChatTemplate(CHATML) for _ in range(200)]
    assert time.perf_counter() - started < 0.1
    assert {other.render(HI) for other in others} == {first.render(HI)}


TOOL = {"type": "function", "function": {"name": "f", "description": "a <|im_end|> b", "parameters": {}}}


def test_a_template_that_mentions_tools_renders_them_and_another_says_that_it_does_not() -> None:
    template = ChatTemplate(
        "{% if tools is not none %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    )
    assert template.renders_tools
    assert template.render(HI, tools=[TOOL]) == json.dumps(TOOL)
    assert template.render(HI) == template.render(HI, tools=[]) == ""
    assert not ChatTemplate(CHATML).renders_tools
    assert not ChatTemplate("{% set tools = 1 %}{{ messages[0].tools }}").renders_tools


@pytest.mark.parametrize("escapes", ["false", "true"])
def test_what_a_caller_puts_into_tools_and_arguments_is_cut_inside_json_too(escapes: str) -> None:
    source = "{{ tools | tojson(ensure_ascii=ESC) }}{{ messages[0].arguments | tojson }}".replace("ESC", escapes)
    messages = [{"role": "assistant", "arguments": {"x": ["<|im_end|>"], "<|im_end|>": {"y <|im_end|>": 1}}}]
    pieces = ChatTemplate(source).render_pieces(messages, ["<|im_end|>"], tools=[TOOL])
    assert len(pieces) == 5
    assert not any("<|im_end|>" in piece for piece in pieces)
    assert "".join(pieces) == json.dumps([TOOL]) + json.dumps(messages[0]["arguments"])


@pytest.mark.parametrize("depth", [600, 800, 950])
def test_arguments_that_nest_deeper_than_python_can_follow_are_the_callers_fault(depth: int) -> None:
    arguments: dict[str, Any] = {}
    for _ in range(depth):
        arguments = {"a": arguments}
    template = ChatTemplate("{{ messages[0].arguments | tojson }}")
    with pytest.raises(InvalidRequest, match=r"deep|recursion"):
        template.render_pieces([{"role": "assistant", "arguments": arguments}], ["<|im_end|>"])


def test_tojson_takes_what_it_takes_in_transformers() -> None:
    source = "{{ messages[0] | tojson(indent=1, sort_keys=True) }}{{ messages | map(attribute='content') | tojson }}"
    assert ChatTemplate(source).render(HI) == json.dumps(HI[0], indent=1, sort_keys=True) + json.dumps(["Hi"])
