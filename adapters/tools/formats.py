"""The formats in which models write tool calls into their text: their marks, and which of them a template teaches.

    format_of(template)                      # "hermes", "mistral", ...; None for one that is not read here
    MARKERS["hermes"]                        # ("<tool_call>", "</tool_call>")

Each with a public source (templates: models/templates in llama.cpp, release b11434):

- `hermes`: `<tool_call>{"name": .., "arguments": {..}}</tool_call>`, one for each call. Qwen 2.5 and 3, Hermes 2 and 3,
  Granite 4: templates Qwen-Qwen2.5-7B-Instruct, NousResearch-Hermes-3-Llama-3.1-8B-tool_use.
- `llama3_json`: `{"name": .., "parameters": {..}}`, sometimes after `<|python_tag|>`, several with `;` in between.
  Llama 3.1 to 3.3: template meta-llama-Llama-3.1-8B-Instruct, and vLLM 0.32, tool_parsers/llama_tool_parser.py.
- `mistral`: `[TOOL_CALLS][{"name": .., "arguments": {..}}, ..]` up to tokenizer version 7, later
  `[TOOL_CALLS]name[ARGS]{..}`, with `[CALL_ID]id` after the name in version 11. mistral_common, experimental/tools.py;
  ids of nine letters and digits: mistral_common, protocol/instruct/validator.py.
- `deepseek`: each call between `<｜tool▁call▁begin｜>` and `<｜tool▁call▁end｜>`, all of them between another such pair
  with `calls` for `call`. V3 and R1 write `function<｜tool▁sep｜>name` and the arguments in a fence of JSON, V3.1
  `name<｜tool▁sep｜>{..}`: templates llama-cpp-deepseek-r1 and deepseek-ai-DeepSeek-V3.1.
- `gpt_oss`: harmony messages, `<|channel|>NAME to=functions.f <|constrain|>json<|message|>{..}<|call|>`; the channel
  `analysis` is thought, others without a recipient are text. openai/harmony, docs/format.md; template
  openai-gpt-oss-120b.
- `json`: the answer begins with a call or a list of calls, `{"name": .., "arguments": {..}}`, as a grammar forces it.
"""

from __future__ import annotations

import re
import secrets
import string
from hashlib import sha256
from typing import Literal, TypeAlias, get_args

ToolFormat: TypeAlias = Literal["hermes", "llama3_json", "mistral", "deepseek", "gpt_oss", "json"]
FORMATS: tuple[ToolFormat, ...] = get_args(ToolFormat)

# What marks a call. Engines that hide special tokens hide these too where the model's tokenizer has them as such.
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")

MARKERS: dict[ToolFormat, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3_json": (),  # its `<|python_tag|>` may be left out
    "mistral": ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    "deepseek": (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_SEP, CALL_END),
    "gpt_oss": (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS),
    "json": (),
}
PYTHON_TAG = "<|python_tag|>"
_ALPHANUMERIC = string.ascii_letters + string.digits
TOOL_TOKENS = frozenset({PYTHON_TAG}.union(*MARKERS.values()))


def format_of(template: str) -> ToolFormat | None:
    """The format that a chat template teaches its model, by the markers in it; None where it is none of ours.

    Some have the markers and put something other than JSON between them: `<function=..>` (Qwen3-Coder, Nemotron),
    `<arg_key>` (GLM), `<invoke ..>` (MiniMax).
    """
    if any(mark in template for mark in ("<function=", "<arg_key>", "<invoke")):
        return None
    if CALL_BEGIN in template:
        return "deepseek"
    if CHANNEL in template and "functions." in template:
        return "gpt_oss"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        return "hermes"
    if PYTHON_TAG in template or ('"parameters": ' in template and "<|start_header_id|>ipython" in template):
        return "llama3_json"
    return None


def new_call_id(tool_format: ToolFormat | None = None) -> str:
    """A fresh id, in the shape that the model's template wants to see again."""
    fresh = f"call_{secrets.token_hex(12)}"
    return mistral_id(fresh) if tool_format == "mistral" else fresh


def mistral_id(call_id: str) -> str:
    """The id in Mistral's shape, nine letters or digits; the same one for the same id."""
    if re.fullmatch("[a-zA-Z0-9]{9}", call_id):
        return call_id
    number = int.from_bytes(sha256(call_id.encode()).digest())
    return "".join(_ALPHANUMERIC[number // 62**place % 62] for place in range(9))
