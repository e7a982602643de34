"""A scripted twin of the library: a byte-level model that answers with its own prompt, one byte a step.

Words in the prompt make it misbehave: [refuse] at the door, [exhaust] after two tokens, [crash] in the second step.
What is cancelled is written to the file that TWIN_CANCELLED names.
"""

import os
import time
from enum import Enum

import numpy

__version__ = "2026.4.1.0-twin"
EOS, NUM_BYTES = 256, 256
GenerationFinishReason = Enum("GenerationFinishReason", "NONE STOP LENGTH")
GenerationStatus = Enum("GenerationStatus", "RUNNING FINISHED IGNORED CANCEL")


class Tokenizer:
    def __init__(self, path):
        if not os.path.exists(path):
            raise RuntimeError(f"no such file: {path}")

    def encode(self, text, add_special_tokens=True):
        return Attributes(input_ids=Attributes(data=numpy.array([list(text.encode())], dtype=numpy.int64)))

    def decode(self, tokens, skip_special_tokens=True):
        special = "" if skip_special_tokens else "<eos>"
        return [special if ids == [EOS] else bytes(ids).decode("utf-8", "ignore") for ids in tokens]

    def get_vocab(self):
        return {**{bytes([value]): value for value in range(NUM_BYTES)}, b"<eos>": EOS}

    def get_original_chat_template(self):
        return "{% for message in messages %}{{ message.role[0] }}:{{ message.content }};{% endfor %}"

    def get_bos_token(self):
        return ""

    def get_eos_token(self):
        return "<eos>"


class Attributes:
    def __init__(self, **fields):
        self.__dict__.update(fields)


class SchedulerConfig(Attributes):
    pass


class Handle:
    def __init__(self, prompt, config):
        self.text = bytes(prompt).decode("utf-8", "replace")
        self.script = [*prompt, EOS]
        self.config = config
        self.status = GenerationStatus.RUNNING
        self.num_made = 0
        self.unread = []

    def step(self):
        if "[crash]" in self.text and self.num_made == 1:
            raise RuntimeError("the device is lost")
        if "[exhaust]" in self.text and self.num_made == 2:
            self.status = GenerationStatus.IGNORED
            return
        token = self.script[self.num_made % len(self.script)]
        self.num_made += 1
        ended = token == EOS and not self.config.ignore_eos and self.num_made > self.config.min_new_tokens
        full = self.num_made == self.config.max_new_tokens
        reason = (
            GenerationFinishReason.STOP
            if ended
            else GenerationFinishReason.LENGTH
            if full
            else GenerationFinishReason.NONE
        )
        if ended or full:
            self.status = GenerationStatus.FINISHED
        self.unread.append(Attributes(generated_ids=[token], finish_reason=reason))

    def can_read(self):
        return bool(self.unread)

    def read(self):
        return {0: self.unread.pop(0)}

    def get_status(self):
        return self.status

    def cancel(self):
        self.status = GenerationStatus.CANCEL
        with open(os.environ["TWIN_CANCELLED"], "a") as file:
            file.write(f"{self.text}\n")


class ContinuousBatchingPipeline:
    def __init__(self, path, scheduler_config, device, properties):
        assert device == "CPU"
        assert properties["INFERENCE_NUM_THREADS"] > 0
        if os.path.getsize(path) == 0:
            raise RuntimeError("the file is not a GGUF")
        self.running = []

    def get_config(self):
        return Attributes(ignore_eos=False, max_new_tokens=None, min_new_tokens=0)

    def add_request(self, request_id, tensor, config):
        handle = Handle(tensor.data[0].tolist(), config)
        if "[refuse]" in handle.text:
            raise RuntimeError("Check failed at generation_config.cpp:1:\nthis value is out of range\n")
        self.running.append(handle)
        return handle

    def has_non_finished_requests(self):
        return bool(self.running)

    def step(self):
        time.sleep(0.002)
        for handle in self.running:
            if handle.status is GenerationStatus.RUNNING:
                handle.step()
        self.running = [handle for handle in self.running if handle.status is GenerationStatus.RUNNING]

    def get_metrics(self):
        return Attributes(scheduled_requests=len(self.running), cache_usage=12.5)
