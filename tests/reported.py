"""What users of other gateways reported, and what attackers send; tests/reliability.py makes its page of them.

G.. are reports, A.. attacks. Tests carry their numbers in a mark (tests/replays.py).
"""

from __future__ import annotations

from tests.replays import Fault

FAULTS = {
    "G01": Fault(
        "The engine goes on after the client of a whole answer has left",
        "Nobody watches the client's connection while the answer is awaited (litellm#37140, #30223, #14295, #14304).",
    ),
    "G02": Fault(
        "The engine goes on when its client leaves before the first token",
        "The end of the connection is noticed with the next write, and there is none (litellm#31499).",
    ),
    "G03": Fault(
        "The engine goes on when its client leaves in the middle of a stream",
        "The generator around the engine's stream is not closed, on one route of several (litellm#30245, #36123).",
    ),
    "G04": Fault(
        "A caller is refused for requests that are long over",
        "Places are given back by a path that an aborted or even a completed request does not take; one release held "
        "them for an hour (litellm#27955, #30020).",
    ),
    "G05": Fault(
        "The number of open requests is negative",
        "A replica that had gone and came back began to count anew while its old requests ended (llm-d-router#1739).",
    ),
    "G06": Fault(
        "What a client got before it left is in no account",
        "Usage comes with the last event, which an aborted stream never sees (litellm#14457).",
    ),
    "G07": Fault(
        "Memory grows with every request",
        "Tasks that nobody refers to, caches without bounds (litellm#12685, #17784, #27954, #25219, #38193).",
    ),
    "G08": Fault(
        "The memory of prefixes grows without bounds",
        "A trie of all prompts that were ever routed (production-stack#687).",
    ),
    "G09": Fault(
        "Cleaning up the log takes all memory",
        "All rows were read to delete some (litellm#21908).",
    ),
    "G10": Fault(
        "One failing stream takes a whole processor",
        "An error 429 in the middle of a stream, with nothing to fall back to, was tried again without end "
        "(litellm#26015).",
    ),
    "G11": Fault(
        "Large bodies make the streams of others stutter",
        "Bodies are parsed, and streams iterated, where all requests wait for it (litellm#20268, #13546).",
    ),
    "G12": Fault(
        "Hundreds of streams are slower through the gateway than without it",
        "Chunks were gathered by a timer, or work was done once for each (litellm#21046, gpustack#1842, ray#59681).",
    ),
    "G13": Fault(
        "A thousand connections end the gateway",
        "It ran out of file descriptors and did not say so (production-stack#448).",
    ),
    "G14": Fault(
        "Clients fail on the event that brings the usage",
        "It had a choice, or came in an event of another shape (litellm#28735, #28736, #8450).",
    ),
    "G15": Fault(
        "The usage of a stream is lost",
        "Engines send it after the finish reason, when readers have stopped (litellm#25410, #25389, #11915, #9657).",
    ),
    "G16": Fault(
        "A stream ends in the middle of its text",
        "The text held `data: [DONE]`, and a reader took it for the end (smg#1878).",
    ),
    "G17": Fault(
        "An error of the engine is text to the client, or success",
        "It came glued to half a line of data, as JSON that was valid, or under status 200 (codex-router#100, "
        "smg#1682, claude-code-router#1759).",
    ),
    "G18": Fault(
        "The bill is not what the engine counted",
        "The gateway counted again, with another tokenizer (mlx-dspark#37).",
    ),
    "G19": Fault(
        "Thoughts are lost, or an engine refuses a history that holds some",
        "Reasoning has several names and forms, and vLLM takes no thinking blocks (litellm#20246, #22997).",
    ),
    "G20": Fault(
        "Several tool calls become one",
        "Pieces of parallel calls interleave, and were joined in the order of arrival (litellm#7621).",
    ),
    "G21": Fault(
        "A request with tools is answered with text",
        "It went to an engine that cannot parse calls (litellm#35711, #17246).",
    ),
    "G22": Fault(
        "An engine refuses a field that the client never set",
        "A gateway filled in null, `encoding_format` among others (litellm, incident of February 2026).",
    ),
    "G23": Fault(
        "A truncated answer looks whole",
        "The engine's connection broke, and the gateway closed the stream in the ordinary way "
        "(Portkey-AI/gateway#1797).",
    ),
    "G24": Fault(
        "The fallback is never asked",
        "A stream that was cut or stalled before its first token was handed on as it was (litellm#40404).",
    ),
    "G25": Fault(
        "An answer holds the beginning of one and the rest of another",
        "After a failure in its middle the second engine's answer was put behind the first's (litellm#32835, "
        "caracal#344).",
    ),
    "G26": Fault(
        "Clients with strict types fail on the end of a stream",
        "Finish reasons that OpenAI does not have, errors in mid-stream under the wrong class (dynamo#14403, #8549, "
        "#12442, production-stack#952).",
    ),
    "G27": Fault(
        "An error is JSON inside JSON, or has a status that means something else",
        "Each layer wrapped what it got; nothing to route to was told as the caller's fault (aibrix#2594, "
        "litellm#40958).",
    ),
    "G28": Fault(
        "A replica that always fails is asked again and again",
        "Failures did not add up, or a later one shortened the pause (litellm#34836, #40130).",
    ),
    "G29": Fault(
        "`Retry-After` has no effect",
        "It was not read, as seconds or as a date, or did not reach the client (litellm#7669).",
    ),
    "G30": Fault(
        "One tenant's bad requests take an engine from all others",
        "Refusals with 4xx counted as failures of the engine (sglang#25811).",
    ),
    "G31": Fault(
        "An engine that is well again gets no requests, or a slow one gets them all",
        "The half-open state never closed; routing by prefix kept to a slow replica (sglang#31206, #14532, #14305).",
    ),
    "G32": Fault(
        "The second attempt sends another body",
        "A body that was a stream had been read, or was sent twice (envoy#36119, envoy-ai-gateway#805, #494).",
    ),
    "G33": Fault(
        "One timeout for everything",
        "Connecting, the first token, silence between tokens and the whole shared one clock (litellm#19909, #19184, "
        "#5859, Franklin#74).",
    ),
    "G34": Fault(
        "Four workers let in four times the limit",
        "Each process counted for itself (litellm#16011).",
    ),
    "G35": Fault(
        "One tenant is answered from another's cache",
        "The key of the cache left out the tenant, the model or a sampling parameter (litellm#29955, #25447, #8570, "
        "promptfoo#7014).",
    ),
    "G36": Fault(
        "Health checks cost tokens, and fail engines that are well",
        "They generated a token, which models that reason first cannot (litellm#26987, #9584).",
    ),
    "G37": Fault(
        "After each reload another loop watches the engines",
        "What had been started for the old configuration was not ended (production-stack#680, #617, #591, "
        "litellm#30772, #15647).",
    ),
    "G38": Fault(
        "Metrics have a series for whatever clients send",
        "Models, paths and keys became labels as they came (litellm#35666, #39136, #27272, sglang#31193).",
    ),
    "G39": Fault(
        "A replica that cannot work is accepted",
        "Its address was first used in the background, and had no scheme (smg#1967, #1977).",
    ),
    "G40": Fault(
        "A caller cannot tell his own limit from a full engine",
        "Both were 429, and numbers that make no sense were taken as wishes (llm-d-router#1751, #2047, #1917).",
    ),
    "G41": Fault(
        "A path in another spelling leads around the key",
        "What decided was the text of the path, or the Host header, and not the route (CVE-2026-49468, "
        "CVE-2026-35029).",
    ),
    "G42": Fault(
        "One key is taken for another",
        "Keys were remembered by their first 20 characters; a stored hash was accepted as a key (CVE-2026-35030, "
        "GHSA-69x8).",
    ),
}

ATTACKS = {
    "A01": Fault("A length beside chunks", "The next request is smuggled inside the body (CVE-2023-47641)."),
    "A02": Fault("Two lengths, or one that is no number", "Two readers see two bodies (CVE-2025-69224)."),
    "A03": Fault("Transfer encodings that are none", "`xchunked`, `chunked, identity`, a blank before the colon."),
    "A05": Fault("Two hosts, or a host with a path", "The route is chosen by the header (CVE-2026-34525, 48710)."),
    "A06": Fault("A request line of megabytes", "It is kept until it ends (CVE-2026-54277)."),
    "A07": Fault("Headers without end", "They are kept until they end (CVE-2025-48956)."),
    "A09": Fault(
        "A body in chunks of a byte",
        "Each costs as much as a large one (CVE-2025-69229, 23310).",
    ),
    "A10": Fault("Headers and bodies that do not come", "A connection is waited for, and a thousand are."),
    "A11": Fault(
        "Ten thousand requests in one write",
        "All are kept while the first runs (CVE-2026-54273).",
    ),
    "A13": Fault("A form on a route of JSON", "Each of a million fields costs (CVE-2025-69228)."),
    "A14": Fault("A body over the limit", "It is read whole before it is refused."),
    "A15": Fault("A million brackets", "The parser recurses until the stack ends."),
    "A17": Fault(
        "Text that is no UTF-8, and text that deceives", "It fails where it is written, not where it is read."
    ),
    "A18": Fault("Fields of another type", "The fault shows deep inside, as a 500."),
    "A19": Fault("A million choices", "Each is a request of its own to the engine (CVE-2026-34756)."),
    "A21": Fault("Log-probabilities of the whole vocabulary", "Each costs the engine a row (gonka#1171)."),
    "A22": Fault("Numbers that are none", "NaN passes every comparison."),
    "A23": Fault("A hundred thousand stop strings", "Each token is compared with all."),
    "A25": Fault("Ten thousand schemas", "Each is compiled and kept (GHSA-389x-67px-mjg3)."),
    "A26": Fault("Tools that are none", "The fault shows in the engine (CVE-2025-48944)."),
    "A27": Fault("A template of the caller's", "It is run (CVE-2025-62426)."),
    "A29": Fault("Embeddings as a pickle", "They are loaded (CVE-2025-62164)."),
    "A30": Fault("Special tokens spelled out", "A message opens a turn that its role may not."),
    "A31": Fault(
        "An image at an address inside",
        "The gateway fetches it (CVE-2026-24779, 45401, 0599, 22778).",
    ),
    "A33": Fault("An engine that answers with a redirect", "Keys go along to another host."),
    "A34": Fault("An engine that lies", "Its words reach the client, or end the gateway."),
    "A35": Fault("A hundred wrong keys", "Answers differ, and say what was right (CVE-2026-42208, 35030)."),
    "A37": Fault("The stored hash as the key", "It is accepted (GHSA-69x8-hrgq-fjj8)."),
    "A38": Fault("Another tenant's id", "What belongs to him is given out."),
    "A39": Fault("A caller who calls himself an admin", "He is believed (CVE-2026-47101, 47102)."),
    "A41": Fault("Paths and methods in odd spellings", "A check sees one route and the router another."),
    "A42": Fault("Leaving just before the end", "What was streamed is not paid."),
    "A43": Fault("A name with a line break in it", "A forged line stands in the log."),
    "A45": Fault(
        "Guessing another tenant's prompt by the time to the first token",
        "The prefix cache is shared (vllm#53347).",
    ),
    "A46": Fault("Another tenant's salt", "It opens his cache (vllm#44701)."),
    "A47": Fault("Prompts whose hashes collide", "A hash is taken for equality."),
    "A49": Fault("A model file that lies", "Offsets and shapes are believed (CVE-2026-7482, 53923)."),
    "A50": Fault("A configuration that lies", "Tags make objects, aliases fill the memory."),
    "A51": Fault("Another protocol on the port", "The connection is kept, or upgraded."),
    "A53": Fault("A request id of ten kilobytes", "It goes into logs and on to engines."),
    "A55": Fault("Anything at all", "Whatever nobody thought of."),
}
