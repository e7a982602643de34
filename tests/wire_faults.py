"""The faults of the wire that were met in the field, and the page that lists them with their tests.

    python -m tests.wire_faults > docs/wire-faults.md

The page is made of FAULTS and of the marks on the tests (tests/replays.py), and tests/test_wire_faults.py keeps it so.
Sources are issues and pull requests of public projects, as `project#number`.
"""

from __future__ import annotations

import sys

from tests.replays import Fault, table

FAULTS = {
    "W01": Fault(
        "Events are lost",
        "Some servers write `data:` without the space, or end lines with CRLF, which may be cut between two reads; "
        'readers that look for `"data: "` see nothing (openai-python#498, sgl-project/genai-bench#159, '
        "kubernetes-sigs/inference-perf PR781).",
    ),
    "W02": Fault(
        "A long event breaks the stream",
        "Readers by line stop at 64 or 128 KB; log-probabilities and arguments of tools are longer (aiohttp#4453, "
        "inference-perf#283, TensorRT-LLM PR13952, sglang PR7301, open-webui PR24928).",
    ),
    "W03": Fault(
        "The client waits for an end that does not come",
        "Engines end a stream with EOF and without `[DONE]` (tgi#1896 and PR2221, ik_llama.cpp#467, mlc-llm#1300, "
        "vllm-mlx#101).",
    ),
    "W04": Fault(
        "A finish reason that clients do not know",
        "`eos_token`, `eos`, `end`, `stop_sequence`; TGI has none for tools, and none at all after a streamed call "
        "(tgi#2296 and PR2344, openai-dotnet#267; the last is in TGI 3.3's own recorded replies).",
    ),
    "W05": Fault(
        "A stop string leaks",
        "The engine leaves it in the text, or does not see one that ends inside a token (tgi#1724, tgi#1979).",
    ),
    "W06": Fault(
        "Greedy decoding is refused",
        "TGI answers 422 to `top_p: 1` and, on its own route, to `temperature: 0` (tgi#2222, "
        "argilla-io/synthetic-data-generator#48).",
    ),
    "W07": Fault(
        "An error looks like success",
        "It comes as an event, or as JSON, under status 200 (tgi#2749, huggingface_hub#2514).",
    ),
    "W08": Fault(
        "A broken answer looks whole",
        "After the first tokens vLLM sends an error event and then `[DONE]`, llama.cpp an error event and then EOF, "
        "and trtllm-serve drops the connection.",
    ),
    "W09": Fault(
        "The reason of an error is lost",
        "Bodies are nested, flat, a text, HTML of a proxy, or empty (sglang#33504 and PR33534, vllm#12886, ray#64833).",
    ),
    "W10": Fault(
        "A history with tool calls is refused",
        "Assistant turns whose content is null, absent, empty or an empty list (tgi PR3021 and PR3036, "
        "vllm-ascend#14501, lmdeploy#3412, vercel/ai#13466, llama-cpp-python#1805).",
    ),
    "W11": Fault(
        "Arguments of tools arrive as an object",
        "OpenAI's are a text that holds JSON (pydantic-ai#398, of TGI).",
    ),
    "W12": Fault(
        "Content in parts is refused",
        "Engines that take plain text fail on a list of text parts (mlx-openai-server PR205, "
        "extended_openai_conversation PR456).",
    ),
    "W13": Fault(
        "Reasoning disappears",
        "One field has two names, `reasoning` and `reasoning_content` (vllm#27755, PR27752 and PR33402, "
        "litellm#20246, vllm-project/router PR115).",
    ),
    "W14": Fault(
        "The engine goes on after its client has left",
        "The gateway does not close its side, or the engine notices late: SGLang after about two seconds, TGI at the "
        "next token, Triton when asked (litellm#13774, #22805, #30244, #37140, sglang#36333, #37833, vllm#54947, "
        "triton-inference-server/server#7077, tensorrtllm_backend#146, llama.cpp#24496).",
    ),
    "W15": Fault(
        "Log-probabilities in the wrong shape",
        "Chat's shape on the completions route, missing `bytes`, `top_logprobs` null (vllm#3179, #4795, "
        "litellm#21932, llama-cpp-python#1787, llama.cpp#11346).",
    ),
    "W16": Fault(
        "An index error on an empty list of choices",
        "Chunks with `choices: []` come first, in the middle and last (litellm#8450 and PR8751, Portkey "
        "gateway#1627 and PR1629, openai4j#60).",
    ),
    "W17": Fault(
        "Tokens are counted twice, or not at all",
        "Usage comes as null, on every chunk, at the end, or never; TGI and vLLM differ by option.",
    ),
    "W18": Fault(
        "A ping is taken for an answer",
        "Comments, `data: : keepalive`, `event: ping`, an `id:` by itself (openai-python#2722, mnfst/llm-gateway#2053, "
        "theopenco/llmgateway PR2334, opencode#50871, mistral-vibe#762).",
    ),
    "W19": Fault(
        "A request is refused for a field that its client always sends",
        "trtllm-serve and others refuse fields that they do not know (vllm PR10463, #12864, cherry-studio#12450, "
        "TensorRT-LLM#9709, garak#748, gpustack#429).",
    ),
    "W20": Fault(
        "The limit of tokens has no effect",
        "An engine knows one of `max_tokens` and `max_completion_tokens` (llama-cpp-python#1907, ik_llama.cpp PR2321, "
        "voideditor#128).",
    ),
    "W21": Fault(
        "Structured output is not structured",
        "A field under an old name, or a server without a backend for it, is ignored in silence (vllm#53975, #12692, "
        "outlines#1887, LocalAI PR10343, NVIDIA/TensorRT#4855).",
    ),
    "W22": Fault(
        "Tokens arrive all at once",
        "A proxy holds the stream back, because nothing told it not to (dstack#4269, llama-swap#236, llama.cpp "
        "PR20872, xagent#1358).",
    ),
    "W23": Fault(
        "Clients unpack what is not packed",
        "A gateway unpacks the engine's answer and passes its `Content-Encoding` on (CubeSandbox PR1139, aiohttp#4462, "
        "#8477, nemo-platform PR1218).",
    ),
    "W24": Fault(
        "A long prompt is refused as too large",
        "aiohttp's default limit is 1 MiB, TGI's 2 MB, and the refusal is plain text (aiohttp#4474, claude-tap PR2, "
        "verifiers PR1833).",
    ),
    "W25": Fault(
        "Anthropic's client reads a stream that is not whole",
        "Blocks without `event:` are skipped, stop reasons and blocks of tools differ (vllm#45367, #44576, #44000, "
        "ogx#5521).",
    ),
    "W26": Fault(
        "The text repeats itself",
        "SGLang's own route and Triton's LLM-API model send all text so far with every event.",
    ),
    "W27": Fault(
        "A small penalty ruins the answer",
        "TGI reads `presence_penalty: x` as a repetition penalty of x + 2 (TGI 3.3.7, `router/src/lib.rs`).",
    ),
}

INTRODUCTION = """\
# Faults of the wire

What engines, proxies and gateways have got wrong before, and the tests that replay it here: against every adapter that
it concerns, and through the gateway where a client would see it. `pytest -m replay` runs them. This page is made by
`python -m tests.wire_faults`, from the marks on the tests.

"""


def page() -> str:
    return INTRODUCTION + table(FAULTS)


if __name__ == "__main__":
    sys.stdout.write(page())
