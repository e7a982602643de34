"""What other load generators and benchmarks have got wrong, and the page that lists it with the tests that replay it.

    python -m tests.arena.faults > docs/arena-faults.md

The page is made of FAULTS and of the marks on the tests (tests/replays.py); tests/arena/test_faults.py keeps it so.
A number stays with its fault; those that are missing were other names of one that is here. Sources are issues and pull
requests of public projects, as `project#number`, or files of theirs that were read.
"""

from __future__ import annotations

import sys

from tests.replays import Fault, table

FAULTS = {
    "R01": Fault(
        "A TTFT of 5 ms where the first word took 214",
        "An event that only names the role was taken for the first token; the current code still starts at any event "
        "with `choices` (vllm#3759, PR3768, endpoint_request_func.py).",
    ),
    "R02": Fault(
        "The first gap between tokens lasts more than a second",
        "The engine named the role after a first slice of the prompt, and the gap was counted from there (vllm#15106).",
    ),
    "R03": Fault(
        "The TTFT is one of the gaps between tokens",
        "A branch lacked its `else`, so the first token was counted as both (vllm#7242).",
    ),
    "R04": Fault(
        "200 requests a second were asked for, 183.5 were sent",
        "Each sleep began when the last one had ended, so what every send costs added up (vllm#21104, PR21108).",
    ),
    "R05": Fault(
        "After a pause requests leave in a burst above the rate",
        "A semaphore let the backlog out, and its requests counted as if they had been due then (vllm PR45502).",
    ),
    "R06": Fault(
        "A mean latency of 506 ms where users waited 1,932",
        "What a request waited in the client's own queue, under a limit of concurrency, was left out (vllm#54101).",
    ),
    "R07": Fault(
        "An engine that stood still for seconds shows one slow request",
        "Coordinated omission: the clock starts when a request leaves, and while the engine stands still none does "
        "(guidellm#1048, PR1053, mlcommons/inference_policies#88, triton-inference-server/server#3113).",
    ),
    "R09": Fault(
        "The TTFT is twice what it is",
        "Each request opened a connection of its own, on a processor that had clocked down (aiperf#1424).",
    ),
    "R10": Fault(
        "Throughput is flat beyond a hundred requests at once",
        "It was the client's: aiohttp opens a hundred connections unless told otherwise (gpustack PR2324).",
    ),
    "R12": Fault(
        "An engine is 86 % faster at the second rate than at the first",
        "Every rate of a sweep drew the same prompts from the same seed, and the prefix cache had them (vllm#52884, "
        "#54227, PR53920).",
    ),
    "R13": Fault(
        "98 % of the prompt tokens come from the cache",
        "Processes drew the same prompts from one seed, or prompts were cut to the beginning that they share (vllm "
        "PR10753, PR20083, inference-perf PR340, #354).",
    ),
    "R14": Fault(
        "The first measured request is much faster than the others",
        "The warm-up had sent that very prompt (`vllm bench serve --num-warmups`, sglang's warm-up).",
    ),
    "R15": Fault(
        "An engine looks fast because its answers are short, or it refuses all requests",
        "`ignore_eos` was not passed on, not supported, or answered with 400 (vllm PR9349, #18687, "
        "tenstorrent/vllm#344, tgi#1944, dynamo PR11662).",
    ),
    "R17": Fault(
        "An engine refuses every request, or its tokens cannot be counted",
        "Strict endpoints answer 400 or 422 to `stream_options` (vllm-swift#19, rocketride-server#1780, "
        "hermes-agent#109143).",
    ),
    "R18": Fault(
        "Gaps of 8.7 ms where a token takes 3.2, and speeds above what is possible",
        "Events carried several tokens (speculation, a bundled first event, a tool's buffer) and counted as one (vllm "
        "PR46652, #27485, sglang PR12064, PR36272, aiperf PR1279).",
    ),
    "R20": Fault(
        "Percentiles hold latencies of 0 ms",
        "What was missing, or came in one piece, was written as 0.0 (sglang PR36047, #12389, #9585, "
        "inference-perf#150).",
    ),
    "R21": Fault(
        "Answers of one token always meet their limit",
        "They have no time per token, and 0 was put in its place (vllm's `--goodput`).",
    ),
    "R22": Fault(
        "An engine that fails half of its requests has fine percentiles",
        "Only successes were counted, and retries among them (vllm PR26478, #24005, #13082, gpustack#1677).",
    ),
    "R23": Fault(
        "A request that failed improves the TTFT",
        "Its first token had come, and nobody asked how it ended (guidellm#444).",
    ),
    "R25": Fault(
        "A model that reasons has a TTFT of many seconds, or 38 tokens of 512",
        "Reasoning comes in fields of its own, which were not read or not counted (guidellm#737, PR742, "
        "perf_analyzer#433, aiperf#391).",
    ),
    "R26": Fault(
        "Latencies are late by what the client computes, and errors count as answers",
        "Stamps were taken after parsing, the end was that of `[DONE]`, and an error event was not read "
        "(tugot17/tokenomics#16).",
    ),
    "R27": Fault(
        "The same engine is slower on another route",
        "There an event with the usage comes last, and it moved the end of the answer (vllm PR55508).",
    ),
    "R29": Fault(
        "Tokens are missing",
        "Reads were stripped of their spaces, `data:` without a space was not known, or only `\\n\\n` ended an event "
        "(vllm PR51172, genai-bench#159, inference-perf's parser).",
    ),
    "R30": Fault(
        "Tokens arrive in lumps of a kilobyte",
        "The client's reader waited until it had 1,024 bytes (locust PR3311, `FastHttpUser.iter_lines` with "
        "geventhttpclient).",
    ),
    "R32": Fault(
        "The TTFT is nearly the whole answer, and a token takes no time",
        "The engine computes all of it before it sends any: the stream is a pretence (kekzl/imp#754, "
        "claude-code-local#39).",
    ),
    "R34": Fault(
        "Behind a gateway the TTFT grows from 1 to 15 s with a thousand users, and requests count twice",
        "The gateway searched its whole buffer again with each piece, and counted every retry as a request "
        "(auto_ai_router#107).",
    ),
    "R35": Fault(
        "A prompt of one token is empty",
        "Special tokens were taken off the length that was asked for (vllm#24591).",
    ),
    "R36": Fault(
        "Prompts are 3 % to five times longer than was asked for",
        "Text does not come back as the tokens it was made of; another tokenizer, or a chat template, adds to it "
        "(vllm#10847, PR24937, PR42532, #44708, aiperf PR644).",
    ),
    "R37": Fault(
        "Clients send in step, at another rate than was asked for",
        "They shared a seed, or took Poisson counts for exponential gaps (vllm PR28512, PR43212).",
    ),
    "R38": Fault(
        "Load comes in bursts that no Poisson process has",
        "Processes that were forked shared seed and offset: counts per second vary 3.6 (four of them) to 7.7 times "
        "(ten) what they should (guidellm's strategies.py, measured).",
    ),
    "R39": Fault(
        "Equal gaps are not equal, and a request leaves on each full second",
        "Gaps were drawn at random and stretched to fill one second after the other, without a seed (inference-perf's "
        "load_timer.py, measured).",
    ),
    "R40": Fault(
        "The share of errors is always 0",
        "It was divided before the errors had been counted (genai-bench's aggregated_metrics_collector.py).",
    ),
    "R43": Fault(
        "Fewer requests are open than were asked for, or more",
        "A limit of a hundred held for each process, or that of all was not shared out (guidellm#487, "
        "inference-perf#319).",
    ),
    "R45": Fault(
        "Times per token are half of what they are, and answers of one token have no TTFT",
        "Events were taken for tokens, each event's text was tokenized with a begin token of its own, and a check of "
        "the length dropped short answers (inference-perf#410, #364, #564).",
    ),
    "R46": Fault(
        "TTFT and gaps grow with the load, and the engine has nothing to do with it",
        "The client reads late, because its own tasks wait for each other (llm-d-benchmark#261).",
    ),
    "R47": Fault(
        "The tail is a hundred times the median",
        "Kernels were compiled, or graphs captured, for the first requests that were measured (vllm#16858, "
        "aws-do-eks#88, #73, TensorRT-LLM#18432).",
    ),
    "R49": Fault(
        "The first second after a pause is slow",
        "The client slept between its steps, and the device clocked down (sglang PR19916).",
    ),
    "R50": Fault(
        "Long answers fail at 300 s, or a benchmark hangs for hours",
        "Time limits were those that the client's library happens to have (vllm-omni#5548, vllm PR7130).",
    ),
    "R51": Fault(
        "Load falls to nothing again and again",
        "The next requests waited until the last of the batch was done (llmperf PR59, PR99).",
    ),
    "R54": Fault(
        "A system under pressure shows latencies that its users did not see",
        "Sends were held back by it, and with them the clocks: coordinated omission, outside this field "
        "(openmessaging/benchmark#247, FalkorDB/benchmark#179).",
    ),
}

INTRODUCTION = """\
# Faults of benchmarks

What load generators and benchmarks of other projects have got wrong, and the tests that replay it here, against an
engine whose timing is known or over rows that show it. `pytest -m replay tests/arena` runs them. How the figures of
three such tools compare with ours is told in [outside-check.md](outside-check.md). This page is made by
`python -m tests.arena.faults`, from the marks on the tests.

"""


def page() -> str:
    return INTRODUCTION + table(FAULTS)


if __name__ == "__main__":
    sys.stdout.write(page())
