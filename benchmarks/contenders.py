"""The engines that ``cpu_engine`` compares, each in a process of its own: ``contenders.py NAME DIRECTORY``.

All are greedy, ignore the end token, take every core and report through one Timeline.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from child import answer_lines
from models import MAX_BATCH_SIZE, MAX_NUM_TOKENS
from sse import stream_all
from timeline import Timeline

Prompts = Sequence[Sequence[int]]  # token ids; ours takes texts too
Contender = Callable[..., dict[str, Any]]
"""Called with ``prompts`` and ``max_tokens``; returns Timeline.summary()."""


def plansmith(engine_and_checkpoint: str) -> Contender:
    """Our scheduler over our engine, in one process."""
    from tokenizers import Tokenizer

    import builder
    from plugins.generation import GenerationOutput, GenerationRequest, SamplingParams
    from plugins.inflight_batching.generator import InflightGenerator

    engine_dir, checkpoint = map(Path, engine_and_checkpoint.split(os.pathsep))
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    timeline, num_open, all_ended = Timeline(0), 0, threading.Event()

    def sink(outputs: list[GenerationOutput]) -> None:
        nonlocal num_open
        now = timeline.now()
        for output in outputs:
            timeline.add(int(output.request_id), now, output.num_output_tokens)
            num_open -= output.finish_reason is not None
        if not num_open:
            all_ended.set()

    generator = InflightGenerator(builder.load_engine(engine_dir), tokenizer, (), sink)

    def run(prompts: Prompts, max_tokens: int) -> dict[str, Any]:
        nonlocal timeline, num_open
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        all_ended.clear()
        timeline, num_open = Timeline(len(prompts)), len(prompts)
        for number, prompt in enumerate(prompts):
            prompt_ids = tokenizer.encode(prompt).ids if isinstance(prompt, str) else prompt
            generator.submit(GenerationRequest(str(number), prompt_ids, sampling))
        all_ended.wait()
        return timeline.summary()

    return run


def openvino_genai(model_and_engine: str) -> Contender:
    """ContinuousBatchingPipeline on the same bits, with the compile properties of our engine."""
    import openvino
    import openvino_genai

    import builder
    from builder.targets.cpu.settings import thread_properties

    model_dir, engine_dir = map(Path, model_and_engine.split(os.pathsep))
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_batched_tokens, scheduler.max_num_seqs = MAX_NUM_TOKENS, MAX_BATCH_SIZE
    scheduler.cache_size = 1  # GB
    properties = builder.read_manifest(engine_dir).compile_properties | thread_properties(None)
    pipeline = openvino_genai.ContinuousBatchingPipeline(model_dir, scheduler, "CPU", properties)
    next_id = 0

    def run(prompts: Prompts, max_tokens: int) -> dict[str, Any]:
        nonlocal next_id
        settings = openvino_genai.GenerationConfig(max_new_tokens=max_tokens, ignore_eos=True, do_sample=False)
        timeline = Timeline(len(prompts))
        handles = []
        for prompt in prompts:
            handles.append(pipeline.add_request(next_id, openvino.Tensor(np.array([prompt], np.int64)), settings))
            next_id += 1
        counts = [0] * len(prompts)
        while pipeline.has_non_finished_requests():
            pipeline.step()
            now = timeline.now()
            for number, handle in enumerate(handles):
                if handle.can_read():
                    counts[number] += sum(len(output.generated_ids) for output in handle.read().values())
                    timeline.add(number, now, counts[number])
        return timeline.summary()

    return run


def llama_cpp(gguf: str) -> Contender:
    """llama.cpp's own HTTP server with its defaults of the KV cache (float16) and of batches."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = gguf
    params.n_parallel = 16
    params.n_ctx = 16 * 1024
    params.cache_prompt = False
    params.cache_ram_mib = 0
    params.verbosity = 1  # errors and warnings
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = len(os.sched_getaffinity(0))
    server = xllamacpp.Server(params)

    def run(prompts: Prompts, max_tokens: int) -> dict[str, Any]:
        settings = {"n_predict": max_tokens, "samplers": ["top_k"], "top_k": 1, "ignore_eos": True, "stream": True}
        bodies = [{**settings, "prompt": list(prompt), "cache_prompt": False} for prompt in prompts]
        timeline, counts = Timeline(len(prompts)), [0] * len(prompts)

        def on_message(number: int, message: dict[str, Any]) -> None:
            counts[number] = message.get("tokens_predicted", counts[number])
            timeline.add(number, timeline.now(), counts[number])

        stream_all(f"{server.listening_address}/completion", bodies, on_message)
        return timeline.summary()

    return run


CONTENDERS = {"plansmith": plansmith, "openvino_genai": openvino_genai, "llama_cpp": llama_cpp}

if __name__ == "__main__":
    answer_lines(lambda: CONTENDERS[sys.argv[1]](sys.argv[2]))
