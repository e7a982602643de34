"""OpenVINO GenAI's pipeline in a process of its own, and the asyncio face of that process.

    engine = await PipelineProcess.start(settings)
    generation = engine.submit([job])                 # one job for each choice
    async for output in generation: ...               # token ids as they come; leaving early: generation.cancel()

Why a process: the library's `step()` holds Python's global lock from beginning to end (measured with 2026.4.1: 28 ms at
32 sequences, 100 ms and more in a prefill), so that a server in the same process could neither read a request nor write
a token meanwhile. Two processes cost one small message a step. It runs inside OpenVINO's environment, on the standard
library, msgspec and OpenVINO only.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
from collections.abc import AsyncIterator, Iterable
from multiprocessing.connection import Connection
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Struct

from adapters.errors import EngineFailed, EngineUnavailable, InvalidRequest, Overloaded


class Settings(Struct, frozen=True, kw_only=True):
    model: str
    threads: int
    kv_cache_gib: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prefix_caching: bool


LARGEST_MIN_P = 0.999_999  # the library refuses 1, which leaves the likeliest token alone, as this does


class Job(Struct, frozen=True, kw_only=True, array_like=True):
    """One sequence to generate. A temperature of 0 is greedy; 0 for `top_k` is off."""

    prompt_ids: list[int]
    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    ignore_eos: bool = False


Finish: TypeAlias = Literal["stop", "length", "refused", "exhausted"]


class Output(Struct, frozen=True, array_like=True):
    """What one step brought for one sequence. `reason` explains a refusal."""

    sequence: int
    token_ids: list[int]
    finish: Finish | None = None
    reason: str = ""


class Add(Struct, frozen=True, array_like=True, tag=True):
    sequence: int
    job: Job


class Cancel(Struct, frozen=True, array_like=True, tag=True):
    sequence: int


class Step(Struct, frozen=True, array_like=True):
    """The worker's only message. An empty one says that the pipeline is loaded."""

    outputs: list[Output] = []
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0


_commands = msgspec.msgpack.Decoder(Add | Cancel)
_steps = msgspec.msgpack.Decoder(Step)
_encode = msgspec.msgpack.Encoder().encode

# ---------------------------------------------------------------------------------------------- the worker's side


def work(connection: Connection, settings: Settings) -> None:
    """The worker process: load, then take commands and step until the other side hangs up."""
    import openvino_genai

    pipeline = openvino_genai.ContinuousBatchingPipeline(
        settings.model, _scheduler_config(settings), "CPU", {"INFERENCE_NUM_THREADS": settings.threads}
    )
    connection.send_bytes(_encode(Step()))
    handles: dict[int, Any] = {}
    try:
        while True:
            outputs = _take_commands(connection, pipeline, handles)
            if handles:
                pipeline.step()
                outputs += _read(handles)
            if outputs:
                metrics = pipeline.get_metrics()
                scheduled = min(metrics.scheduled_requests, len(handles))
                step = Step(outputs, scheduled, len(handles) - scheduled, metrics.cache_usage / 100)
                connection.send_bytes(_encode(step))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return


def _take_commands(connection: Connection, pipeline: Any, handles: dict[int, Any]) -> list[Output]:
    """Everything that has arrived; waits for something only when there is nothing to step."""
    refusals: list[Output] = []
    while connection.poll(0 if handles or refusals else None):
        command = _commands.decode(connection.recv_bytes())
        if isinstance(command, Cancel):
            handle = handles.pop(command.sequence, None)
            if handle is not None:
                handle.cancel()
                if not handles and pipeline.has_non_finished_requests():
                    pipeline.step()  # what is cancelled gives its blocks back in the next step
            continue
        try:
            handles[command.sequence] = _add(pipeline, command)
        except RuntimeError as error:  # the library's own checks of lengths and ranges
            refusals.append(Output(command.sequence, [], "refused", str(error).strip().splitlines()[-1]))
    return refusals


def _add(pipeline: Any, command: Add) -> Any:
    import numpy
    import openvino  # type: ignore[import-not-found]  # lives in the engine's own environment

    prompt = openvino.Tensor(numpy.array([command.job.prompt_ids], dtype=numpy.int64))
    return pipeline.add_request(command.sequence, prompt, generation_config(pipeline.get_config(), command.job))


def generation_config(config: Any, job: Job) -> Any:
    """Fill the library's config, which starts with the model's own end-of-text tokens."""
    config.max_new_tokens = job.max_tokens
    config.min_new_tokens = job.min_tokens
    config.ignore_eos = job.ignore_eos
    config.repetition_penalty = job.repetition_penalty
    config.presence_penalty = job.presence_penalty
    config.frequency_penalty = job.frequency_penalty
    config.do_sample = job.temperature > 0
    if config.do_sample:
        config.temperature = job.temperature
        config.top_p = job.top_p
        config.min_p = min(job.min_p, LARGEST_MIN_P)
        config.rng_seed = job.seed
        if job.top_k:
            config.top_k = job.top_k
    return config


def _read(handles: dict[int, Any]) -> list[Output]:
    """New tokens of every sequence; finished ones leave `handles`."""
    from openvino_genai import GenerationFinishReason, GenerationStatus

    finish_reasons: dict[Any, Finish] = {GenerationFinishReason.STOP: "stop", GenerationFinishReason.LENGTH: "length"}
    outputs = []
    for sequence, handle in list(handles.items()):
        token_ids: list[int] = []
        finish: Finish | None = None
        while handle.can_read():
            for part in handle.read().values():
                token_ids += part.generated_ids
                finish = finish_reasons.get(part.finish_reason, finish)
        if finish is None and handle.get_status() == GenerationStatus.IGNORED:
            finish = "exhausted"
        if finish is not None:
            del handles[sequence]
        if token_ids or finish is not None:
            outputs.append(Output(sequence, token_ids, finish))
    return outputs


def _scheduler_config(settings: Settings) -> Any:
    import openvino_genai

    config = openvino_genai.SchedulerConfig()
    config.cache_size = settings.kv_cache_gib
    config.max_num_seqs = settings.max_num_seqs
    config.max_num_batched_tokens = settings.max_num_batched_tokens
    config.dynamic_split_fuse = True  # prefill in chunks beside running decodes
    config.enable_prefix_caching = settings.prefix_caching
    return config


# ---------------------------------------------------------------------------------------------- the server's side


class Generation:
    """The choices of one request, as they are generated."""

    def __init__(self, process: PipelineProcess, sequences: Iterable[int]) -> None:
        self._process = process
        self._index = {sequence: index for index, sequence in enumerate(sequences)}
        self._outputs: asyncio.Queue[Output | None] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Output]]:
        """Yields (choice, output) until every choice is finished or cancelled."""
        while self._index:
            output = await self._outputs.get()
            if output is None:
                raise EngineFailed("OpenVINO's pipeline has ended; its log says why.")
            if output.finish == "refused":
                raise InvalidRequest(f"OpenVINO refused the request: {output.reason}")
            if output.finish == "exhausted":
                raise Overloaded("OpenVINO ran out of KV cache blocks; send less at once or give it a larger cache.")
            index = self._index.get(output.sequence)
            if index is None:
                continue  # it was cancelled while this was under way
            if output.finish is not None:
                del self._index[output.sequence]
            yield index, output

    def cancel(self, choice: int | None = None) -> None:
        """Stop the work on one choice or on all; harmless when it has ended."""
        for sequence in [sequence for sequence, index in self._index.items() if choice in (None, index)]:
            del self._index[sequence]
            self._process.cancel(sequence)

    def put(self, output: Output | None) -> None:
        self._outputs.put_nowait(output)


class PipelineProcess:
    """The worker process as the server sees it."""

    def __init__(self, process: multiprocessing.process.BaseProcess, connection: Connection) -> None:
        self._process = process
        self._connection = connection
        self._numbers = itertools.count(1)
        self._generations: dict[int, Generation] = {}
        self._last_step = Step()
        self.ended = asyncio.Event()

    @classmethod
    async def start(cls, settings: Settings) -> PipelineProcess:
        """Returns when the model is loaded; raises `EngineUnavailable` when the worker ends before."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs, settings), daemon=True)
        process.start()
        theirs.close()
        try:
            await asyncio.to_thread(ours.recv_bytes)
        except EOFError:
            raise EngineUnavailable("OpenVINO could not load the model; the lines above say why.") from None
        self = cls(process, ours)
        asyncio.get_running_loop().add_reader(ours.fileno(), self._receive)
        return self

    def submit(self, jobs: list[Job]) -> Generation:
        numbers = [next(self._numbers) for _ in jobs]
        generation = Generation(self, numbers)
        for number, job in zip(numbers, jobs, strict=True):
            self._generations[number] = generation
            self._send(Add(number, job))
        return generation

    def cancel(self, sequence: int) -> None:
        if self._generations.pop(sequence, None) is not None:
            self._send(Cancel(sequence))

    def load(self) -> Step:
        """The counts of the last step, and zeros when nothing is under way."""
        return self._last_step if self._generations else Step()

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._connection.fileno())
        self._connection.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()

    def _send(self, command: Add | Cancel) -> None:
        try:
            self._connection.send_bytes(_encode(command))
        except OSError:
            self._fail()

    def _receive(self) -> None:
        try:
            step = _steps.decode(self._connection.recv_bytes())
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self._connection.fileno())
            self._fail()
            return
        self._last_step = step
        for output in step.outputs:
            finished = output.finish is not None
            generation = (self._generations.pop if finished else self._generations.get)(output.sequence, None)
            if generation is not None:
                generation.put(output)

    def _fail(self) -> None:
        for generation in self._generations.values():
            generation.put(None)
        self._generations.clear()
        self.ended.set()
