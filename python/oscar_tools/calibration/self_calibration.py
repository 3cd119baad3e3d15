"""Rotations of a model from nothing: text that is here, an ordinary server that records it, the default fit."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from oscar_cpu.server import has_gpu
from oscar_rotation.atomic import write_text_atomically
from oscar_rotation.fit.bit_goal import BitGoal
from oscar_rotation.fit.options import FitOptions
from oscar_rotation.model_table import ModelSettings, model_settings
from oscar_rotation.recipes import FITTED, FitRequest
from oscar_tools.calibration import shipped_text
from oscar_tools.calibration.data import calibration_chats
from oscar_tools.calibration.dump_driver import LONGEST_PROMPT, ROOM, DumpTask, choose_prompts, record
from oscar_tools.calibration.errors import DataError
from oscar_tools.calibration.folders import CalibrationFolder
from oscar_tools.calibration.model_files import load_tokenizer
from oscar_tools.calibration.progress import fitting
from sglang_oscar.rotation_source import places
from sglang_oscar.rotation_source.cache import Calibration
from sglang_oscar.rotation_source.flags import recording_flags

TOKENS = 32768
"""Ten thousand do nearly what forty thousand do; that all kinds of text are among them does more."""
POOL_TOKENS = 2 * LONGEST_PROMPT
"""Of the server that records: one prompt at a time, and what is computed of it is not looked at again."""
FACTS = "calibration.json"
"""File beside the rotations: what they were made for, and of which text."""


@dataclass(frozen=True)
class SelfCalibration:
    """What to calibrate.

    Attributes:
        args: server arguments as the operator gave them, without their resolution.
        model: SGLang's ModelConfig.
        wanted: what for.
        text: a .jsonl whose lines have ``text`` or ``messages``; None for the text that is shipped.
        tokens: to record.
    """

    args: Any
    model: Any
    wanted: Calibration
    text: Path | None = None
    tokens: int = TOKENS


def calibrate(task: SelfCalibration, out: Path) -> None:
    """Fill a folder with rotation files and :data:`FACTS`; recordings are removed.

    Raises:
        DataError: the text or the tokenizer cannot be had, or there is too little room on the disk.
        DumpError, RotationFileError: the fit failed.
        OSError: a file cannot be read or written.
        ServerFailedError: the recording server did not start, ended, or refused a prompt.
    """
    work = out / "recording"
    settings = _settings(task.args)
    prompts = _prompts(task, settings)
    _check_room(task, out, prompts)
    try:
        folder = CalibrationFolder(work)
        work.mkdir(parents=True)
        record(DumpTask(settings, work, server_args=_server_args(task)), folder, prompts)
        written = _fit(task, folder.dump, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    facts = {
        "model": task.args.model_path, **asdict(task.wanted), "text": str(task.text or "shipped"),
        "tokens": sum(map(len, prompts)), "files": [path.name for path in written],
    }  # fmt: skip
    write_text_atomically(out / FACTS, json.dumps(facts, indent=1) + "\n")


def _settings(args: Any) -> ModelSettings:
    """Of the recording server; the table's are for benchmarks."""
    return model_settings(args.model_path).overridden(
        model=args.model_path, tp_dump=1, gpu="", server_args=(), trust_remote_code=args.trust_remote_code
    )


def _server_args(task: SelfCalibration) -> tuple[str, ...]:
    """Flags of the recording server beside those of every dump: it computes prompts, and decodes nothing."""
    flags = [*recording_flags(task.args), "--max-total-tokens", str(POOL_TOKENS), "--disable-cuda-graph"]
    if not has_gpu() and task.model.has_attention_sinks:
        flags += ["--attention-backend", "intel_amx"]  # the only one on a CPU that SGLang lets them have
    return tuple(flags)


def _prompts(task: SelfCalibration, settings: ModelSettings) -> list[list[int]]:
    args = task.args
    tokenizer = load_tokenizer(settings.overridden(model=args.tokenizer_path or str(places.checkpoint(args))))
    longest = min(LONGEST_PROMPT, task.wanted.context - ROOM)
    if longest < 2:
        raise DataError(f"{args.model_path}: a context of {task.wanted.context} tokens has no room for a prompt")
    if task.text is not None:
        return choose_prompts(tokenizer, calibration_chats(str(task.text)), task.tokens, longest)
    return shipped_text.prompts(tokenizer, task.tokens, longest)


def _check_room(task: SelfCalibration, out: Path, prompts: list[list[int]]) -> None:
    """Refuse before minutes of work what would fill the disk.

    Raises:
        DataError: naming the folder.
    """
    model = task.model
    heads = model.num_attention_heads + 2 * model.get_total_num_kv_heads()
    needed = sum(map(len, prompts)) * model.num_hidden_layers * heads * model.head_dim * 2
    free = shutil.disk_usage(out).free
    if free < needed:
        raise DataError(
            f"{out}: recording takes {needed / 1e9:.1f} GB there, {free / 1e9:.1f} GB are free; set SGLANG_OSCAR_CACHE "
            "to a folder on a larger disk"
        )


def _fit(task: SelfCalibration, dump: Path, out: Path) -> list[Path]:
    wanted, recipe = task.wanted, FITTED[task.wanted.recipe]
    goal = BitGoal.parse(wanted.bits) if "bits" in recipe.options else None
    options = FitOptions(
        group_size=wanted.group_size, context=wanted.context, bits=goal, key_coding=wanted.key_coding,
        value_coding=wanted.value_coding,
    )  # fmt: skip
    # The first GPU of the server: others may be somebody else's.
    device = f"cuda:{task.args.base_gpu_id}" if has_gpu() else "cpu"
    weights = str(places.checkpoint(task.args))
    with fitting() as progress:
        result = recipe.run(FitRequest(dump, options, weights, device, progress=progress))
    for remark in result.remarks:
        print(f"note: {remark}", flush=True)
    print(result.summary, flush=True)
    return result.save(out, result.usual_formats(recipe.suffixes))
