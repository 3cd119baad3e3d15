"""The accuracy of real servers over HTTP, beside the laboratory's for the same method, files and questions."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import requests
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from accuracy.calibration import calibrate
from accuracy.measures.retrieval import Retrieval
from accuracy.methods import all_methods
from accuracy.methods.base import Method, RowMethod, Transforms
from oscar_cpu.server import OUR_PREFIXES, environment, has_gpu
from oscar_rotation.files.rotation_file import save_rotation_file
from oscar_rotation.files.rotation_set import RotationMetadata, RotationSet, Side
from oscar_tools.local_server import serve
from reference_model.evaluate import Questions, calibration_prompts, retrieval_questions

METHODS = ("BF16", "OSCAR g64", "plus g64", "OSCAR g128", "plus g128")
LENGTH, DOCUMENTS, QUESTIONS, SEED = 1024, 3, 4, 47


def transforms_set(transforms: Transforms, side: Side, gain: float) -> RotationSet:
    """A method's transforms, and the gain of its scales, as a rotation file holds them."""
    forward, dual = transforms.forward.float().cpu(), transforms.back.mT.float().cpu()
    orthogonal = bool((forward.mT @ forward - torch.eye(forward.shape[-1])).abs().max() < 1e-4)
    centers = None if transforms.center is None else transforms.center.float().cpu()
    if centers is not None:
        centers = (centers[..., None, :] @ forward)[..., 0, :] if forward.ndim == 4 else centers @ forward
    return RotationSet(
        forward.contiguous(),
        metadata=RotationMetadata(side=side),
        duals=None if orthogonal and centers is None else dual.contiguous(),
        centers=centers,
        gains=(gain,) * len(forward) if gain else None,
    )


def environment_of(method: Method, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Flags and variables that serve a method; its rotation files are written into ``folder``."""
    if not isinstance(method, RowMethod):
        return ([] if has_gpu() else ["--attention-backend", "torch_native"]), {}
    env = {"SGLANG_OSCAR_K_CLIP_RATIO": str(method.k_clip), "SGLANG_OSCAR_V_CLIP_RATIO": str(method.v_clip)}
    sides: tuple[tuple[Side, Transforms, float], ...] = (
        ("k", method.key, method.k_gain),
        ("v", method.value, method.v_gain),
    )
    for side, transforms, gain in sides:
        path = folder / f"{side}.safetensors"
        content = transforms_set(transforms, side, gain)
        save_rotation_file(path, content)
        env |= {f"SGLANG_OSCAR_{side.upper()}_ROTATION_PATH": str(path), "SGLANG_OSCAR_RECIPE": content.recipe}
    return ["--kv-cache-dtype", "int2", "--kv-cache-quant-group-size", str(method.group)], env


def ask(url: str, questions: Questions, prefix: int | None) -> tuple[list[float], list[bool]]:
    """Nats per question token, and whether the greedy answer is right, for each question.

    Args:
        url: of the server.
        questions: what to ask.
        prefix: tokens of a prompt that must come from the prefix cache; None where it makes no difference (BF16).

    Raises:
        RuntimeError: the server found less, or more, in its prefix cache than the laboratory assumes.
    """

    def generate(ids: list[int], tokens: int, **extra: Any) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        reply = requests.post(f"{url}/generate", json={"input_ids": ids, "sampling_params": sampling} | extra)
        reply.raise_for_status()
        return reply.json()

    losses, right = [], []
    document = questions.document_tokens
    for prompt, answer in zip(questions.prompts.tolist(), questions.answers.tolist(), strict=True):
        generate(prompt[:document], 1)
        found = generate(prompt, len(answer), return_logprob=True, logprob_start_len=document)
        meta = found["meta_info"]
        if prefix is not None and meta["cached_tokens"] != prefix:
            raise RuntimeError(f"the server took {meta['cached_tokens']} tokens from its cache, expected {prefix}")
        scored = [entry[0] for entry in meta["input_token_logprobs"]][-(len(prompt) - document - 1) :]
        losses.append(-sum(scored) / len(scored))
        right.append(found["output_ids"] == answer)
    return losses, right


@torch.no_grad()
def measure_server(model: Path, names: tuple[str, ...] = METHODS) -> dict[str, Any]:
    """Serve ``model``, as it is in its folder, with every method, and ask what the laboratory is asked.

    Args:
        model: folder of a model.
        names: methods; those with 2-bit rows, or BF16.

    Raises:
        RuntimeError: see :func:`ask`.
        oscar_tools.local_server.ServerFailedError: a server did not start.
    """
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model).backend_tokenizer
    calibration = calibrate(loaded, calibration_prompts(tokenizer))
    questions = retrieval_questions(tokenizer, LENGTH, DOCUMENTS, QUESTIONS, 8, SEED)
    task = Retrieval(loaded, questions, len(questions.prompts))
    session = task.sessions[0]
    prompt, document = questions.prompts.shape[1], questions.document_tokens
    rows = []
    for name in names:
        method = all_methods()[name]
        method.fit(calibration)
        logits = session.run(method.view(session.schedule)).logits.log_softmax(-1)
        span = slice(document - session.first, prompt - session.first - 1)
        targets = questions.prompts[:, document + 1 :].to(logits.device)
        own = -logits[:, span].gather(-1, targets[..., None])[..., 0].mean(1).cpu()
        verdicts = task.correct(method).tolist()
        with tempfile.TemporaryDirectory() as folder:
            args, env = environment_of(method, Path(folder))
            base = {k: v for k, v in os.environ.items() if not k.startswith(OUR_PREFIXES)}
            sizes = ["--mem-fraction-static", "0.3" if has_gpu() else "0.2", "--max-total-tokens", "16384"]
            with serve(model, Path(folder) / "log", [*args, *sizes], environment(base) | env) as server:
                prefix = session.schedule.ring_start if isinstance(method, RowMethod) else None
                losses, right = ask(server.url, questions, prefix)
        served = torch.tensor(losses)
        rows.append(
            {
                "method": name.rsplit(" g", 1)[0],
                "group": getattr(method, "group", "-"),
                "laboratory": {"nll": float(own.mean()), "retrieval": sum(verdicts) / len(verdicts)},
                "server": {"nll": float(served.mean()), "retrieval": sum(right) / len(right)},
                "worst": float((served - own).abs().max()),
                "same": sum(a == b for a, b in zip(verdicts, right, strict=True)),
                "questions": len(right),
            }
        )
        print(f"server, {name}: {rows[-1]}", flush=True)
    return {"model": model.name, "length": LENGTH, "rows": rows}
