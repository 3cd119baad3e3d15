"""SGLang's scheduler with a model in this process, without HTTP: requests one after the other, logits of every step."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from typing import Any

import torch

PROMPT, ANSWER, MESSAGE = 640, 8, 30
"""Tokens. A prompt has history behind sink and recent window, in several chunks; a second turn hits it."""
CHUNK = 256
SEED = 11


def prompts(vocabulary: int) -> tuple[list[int], list[int], list[int]]:
    """A prompt, another one that has only its last third, and a message that follows an answer."""
    rng = random.Random(SEED)
    tokens = rng.choices(range(3, vocabulary), k=PROMPT)
    other = rng.choices(range(3, vocabulary), k=PROMPT * 2 // 3)
    return tokens, other + tokens[len(other) :], rng.choices(range(3, vocabulary), k=MESSAGE)


@torch.no_grad()
def answers(argv: list[str]) -> dict[str, Any]:
    """Answers of a server with this command line: in the first turn, to the other prompt, and in the second turn.

    For a process that has imported SGLang's scheduler and was forked by ``multiprocessing``: it is hooked as a worker.

    Args:
        argv: of ``python -m sglang.launch_server``.

    Returns:
        ``first``, ``other`` and ``second``, or for a model that sees images those of :func:`seeing.prompts`: pairs of
        token ids and logits [ANSWER, vocabulary] in float32; ``hits``: tokens of the last prompt that were cached.
    """
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.managers import scheduler as module
    from sglang.srt.model_loader import loader
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import PortArgs, prepare_server_args

    from oscar_cpu import window_attention
    from oscar_tools.trial import experts, seeing, weights
    from sglang_oscar.attach import releases

    loader.initialize_dummy_weights = weights.fill
    experts.stand_in()
    args = prepare_server_args(argv)
    args.resolve_once()
    if releases.model_config(args).has_attention_sinks:  # SGLang's own attention in torch knows no sink logits
        window_attention.register()
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
    module.configure_scheduler_process(args, 0)
    scheduler = module.Scheduler(args, PortArgs.init_new(args))
    if scheduler.model_config.is_multimodal:
        said = {name: ask(scheduler, name, *prompt) for name, prompt in seeing.prompts(args, scheduler.model_config)}
    else:
        prompt, other, message = prompts(min(scheduler.model_config.vocab_size, 2000))
        said = {name: ask(scheduler, name, ids) for name, ids in (("first", prompt), ("other", other))}
        said["second"] = ask(scheduler, "second", [*prompt, *said["first"][0], *message])
    return {name: answer[:2] for name, answer in said.items()} | {"hits": [*said.values()][-1][2]}


def ask(scheduler: Any, name: str, prompt: list[int], seen: Any = None) -> tuple[list[int], Any, int]:
    """Greedy continuation of a prompt and what a processor made of its images: token ids, logits [ANSWER, vocabulary],
    and cached tokens of the prompt."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling = SamplingParams(max_new_tokens=ANSWER, temperature=0, ignore_eos=True)
    sampling.normalize(None)
    request = TokenizedGenerateReqInput(
        rid=name, input_text=None, input_ids=array("q", prompt), input_embeds=None, mm_inputs=seen, token_type_ids=None,
        sampling_params=sampling, return_logprob=False, logprob_start_len=-1, top_logprobs_num=0,
        token_ids_logprob=None, stream=False,
    )  # fmt: skip
    scheduler.process_input_requests([request])
    logits: list[torch.Tensor] = []
    for batch, result in steps(scheduler):
        (req,) = batch.reqs
        if len(req.output_ids) > len(logits):
            logits.append(result.logits_output.next_token_logits[0].float().cpu().clone())
        if req.finished():
            break
    return list(req.output_ids), torch.stack(logits).numpy(), int(req.cached_tokens)


def steps(scheduler: Any) -> Iterator[tuple[Any, Any]]:
    """What SGLang's loop without overlap does with a request, batch by batch."""
    while True:
        plan = scheduler.get_next_batch_to_run(running_batch=scheduler.running_batch, last_batch=scheduler.last_batch)
        scheduler.running_batch = plan.running_batch
        batch = plan.batch_to_run
        if batch is None:
            raise RuntimeError("the scheduler has no batch for a request that has not finished")
        result = scheduler.run_batch(batch)
        scheduler.process_batch_result(batch, result)
        scheduler.last_batch = batch
        yield batch, result
