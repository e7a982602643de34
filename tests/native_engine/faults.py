"""What paged engines have got wrong with memory and scheduling, and the page that lists it with its tests.

    python -m tests.native_engine.faults > docs/engine-faults.md

The page is made of FAULTS and of the marks on the tests (tests/replays.py); tests/native_engine/test_faults.py keeps it
so. Sources are issues and pull requests of public projects, as `project#number`, or files of theirs that were read.
"""

from __future__ import annotations

import sys

from tests.replays import Fault, table

ADMISSION = {
    "E01": Fault(
        "A prompt waits for ever, and everybody behind it",
        "It fits the model's context, but not the KV pool, and was let in to the line (vllm#39734).",
    ),
    "E02": Fault(
        "A prompt that is too large ends the engine",
        "What the pool cannot hold met an assertion in the scheduler (nano-vllm `scheduler.py`).",
    ),
    "E03": Fault("A client hangs after too long a prompt", "It was logged and dropped (mini-sglang `scheduler.py`)."),
    "E04": Fault(
        "A resumed request is let in and thrown out again, over and over",
        "It was admitted for its first chunk only (vllm#25538).",
    ),
    "E05": Fault(
        "Nobody runs, many wait, and the cache is empty",
        "An idle pool did not let the head of the line in (vllm#45414).",
    ),
    "E06": Fault(
        "One block is missing, and everybody is preempted",
        "What the victims gave back set nothing free yet, so the loop went on (vllm#49674, vllm-ascend#16315).",
    ),
    "E07": Fault(
        "A preempted request is computed all the same",
        "The victim had been planned already in this step, and its tokens stayed in the budget (vllm#23347).",
    ),
    "E08": Fault(
        "A preempted request starves", "It lost its seniority and went behind those that came later (vllm#41951)."
    ),
    "E09": Fault(
        "Long and short requests preempt one another in every step, with memory free",
        "They were kept in buckets by length, of which one ran at a time (mistral.rs#2024).",
    ),
    "E10": Fault(
        "When the cache is full, every generation is cut off",
        "Active ones were ended instead of made to wait (llama.cpp#23652, #16736).",
    ),
    "E11": Fault("A look into the cache cancels the request that asked", "It changed the task (llama.cpp#23493)."),
    "E12": Fault(
        "A long prompt of a model with a sliding window never starts",
        "Admission charged its full length, not the window's (vllm#55818, #55800).",
    ),
}

BLOCKS = {
    "E13": Fault(
        "A request reads another's keys and values",
        "The number of its cached tokens was kept over a failed attempt, while the cache changed (vllm#18957, #17305).",
    ),
    "E14": Fault(
        "A resumed request fails with an index error",
        "It was sized before its own freed blocks were found again (nano-vllm#211).",
    ),
    "E15": Fault(
        "A prompt of whole blocks that is all cached ends the engine",
        "Nothing was left to compute: a query of length 0 (nano-vllm#144).",
    ),
    "E16": Fault(
        "The second of two equal prompts fails, or what follows it is not cached",
        "A full hit has to compute one token, and to keep the chain (vllm#9972, #11186, #17999).",
    ),
    "E17": Fault(
        "Wrong hits for prompts whose length is a multiple of the block",
        "`token_ids[-0:]` is everything, and a recycled block stayed known by its old hash (MinivLLM#87).",
    ),
    "E18": Fault(
        "An assertion under load: the block has a hash already",
        "It was not taken away when the block was used again (vllm#24084).",
    ),
    "E19": Fault(
        "Other text, or tokens of id 0, when blocks are evicted", "Found by comparing with no cache (vllm#37076)."
    ),
    "E20": Fault(
        "A tenant reads the cache of another",
        "An adapter was called as another's salt, or the external key lacked the adapter (vllm#44701, #30931, #44250).",
    ),
    "E21": Fault("Two prompts have one hash", "A rolling hash: token[j] += 31, token[j+1] -= 1 (Megatron-LM#4158)."),
    "E22": Fault(
        "Hashes can be foretold, or differ between processes",
        "`hash(None)` is a constant, and `hash` of text a secret of the process (CVE-2025-25183, vllm#12621).",
    ),
    "E23": Fault(
        "A third of random prompts are cache hits",
        "What was computed again after a preemption counted as hits (vllm#25780).",
    ),
    "E24": Fault(
        "Two layers disagree about how many tokens are cached", "Each counted for itself (LMCache#2327, #2336)."
    ),
    "E25": Fault("One block has two owners", "It was freed by two paths (sglang-jax#982)."),
    "E26": Fault(
        "The leak check cries while a chunk is computed, or the second chunk never comes",
        "A prompt in the middle was not foreseen (kvcache-ai/sglang#44).",
    ),
    "E27": Fault(
        "Memory leaks a little with each failure", "Scheduling failed after it had taken a slot (sglang#16067)."
    ),
    "E28": Fault(
        "A step writes into blocks that belong to somebody else by now",
        "They were freed while it was in flight (vllm#45357, vllm-ascend#14055).",
    ),
    "E29": Fault(
        "A step reads blocks behind its window that were given away", "The same, for windows (vllm-ascend#13501)."
    ),
    "E35": Fault(
        "An 8-bit cache gives other text after a copy, or nonsense",
        "Scales were left behind, floored at 1, or not read (vllm#49716, mlxcel#717, FreeToken#309).",
    ),
}

SPECULATION = {
    "E31": Fault(
        "A preempted request ends the engine when it goes on, or breaks its grammar",
        "Its draft had not been thrown away (vllm#28558, #30916, #31955).",
    ),
    "E32": Fault(
        "Other text with drafts of more than one token",
        "The token behind the last accepted one counted as computed before it was (vllm#9730).",
    ),
    "E34": Fault(
        "Answers get worse where a step computes several tokens of a request",
        "They were computed at the positions of an earlier step, whose graph was replayed (TensorRT-LLM#17110).",
    ),
    "E36": Fault(
        "Log-probabilities of a prompt are missing, another's, or shifted",
        "The prefix cache left out what they are made of, a buffer held those of an earlier step, or offsets were "
        "wrong where tokens had been dropped (vllm#8268, #3251, #13105, #42245, #29216).",
    ),
    "E37": Fault(
        "Text goes on behind a stop string, or does not fit its tokens",
        "The string lay across tokens, or came in the middle of what a step gave (vllm#3672, #45636, #51641).",
    ),
}

FAULTS = ADMISSION | BLOCKS | SPECULATION


def page() -> str:
    return (
        "# Faults of paged engines, replayed\n\n"
        "What engines with a paged KV cache have got wrong before, and the tests that replay it on the native engine. "
        "`pytest -m replay`\nruns them. This page is made by `python -m tests.native_engine.faults`.\n\n"
        "## Admission, preemption, liveness\n\n"
        + table(ADMISSION)
        + "\n## Blocks and the prefix cache\n\n"
        + table(BLOCKS)
        + "\n## Drafts and text\n\n"
        + table(SPECULATION)
    )


if __name__ == "__main__":
    sys.stdout.write(page())
