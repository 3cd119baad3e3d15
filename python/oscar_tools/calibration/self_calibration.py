"""Rotations of a model from nothing: text that is here, an ordinary server that records it, the default fit."""

from __future__ import annotations

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from oscar_cpu.server import has_gpu
from oscar_rotation.atomic import write_text_atomically
from oscar_rotation.fit.bit_goal import BitGoal
from oscar_rotation.fit.options import FitOptions
from oscar_rotation.model_table import ModelSettings, model_settings
from oscar_rotation.recipes import FITTED, FitRequest
from oscar_tools.calibration import shipped_text
from oscar_tools.calibration.data import calibration_chats
from oscar_tools.calibration.dump_driver import LONGEST_PROMPT, ROOM, DumpTask, choose_prompts, record_prompts
from oscar_tools.calibration.errors import DataError
from oscar_tools.calibration.folders import CalibrationFolder
from oscar_tools.calibration.model_files import load_tokenizer
from oscar_tools.calibration.progress import fitting
from oscar_tools.local_server import ServerFailedError
from sglang_oscar.rotation_source.task import Task

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
        task: the model, and what for.
        text: a .jsonl whose lines have ``text`` or ``messages``; None for the text that is shipped.
        tokens: to record.
    """

    task: Task
    text: Path | None = None
    tokens: int = TOKENS


def calibrate(asked: SelfCalibration, out: Path) -> None:
    """Fill a folder with rotation files and :data:`FACTS`; recordings are removed.

    Raises:
        DataError: the text or the tokenizer cannot be had, or there is too little room on the disk.
        DumpError, RotationFileError: the fit failed.
        OSError: a file cannot be read or written.
        ServerFailedError: the recording server did not start, ended, or refused a prompt.
    """
    task, work = asked.task, out / "recording"
    try:
        folder = CalibrationFolder(work)
        work.mkdir(parents=True)
        prompts = _record(asked, folder, out)
        written = _fit(task, folder.dump, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    facts = {
        "model": task.model, **asdict(task.wanted), "text": str(asked.text or "shipped"),
        "tokens": sum(map(len, prompts)), "files": [path.name for path in written],
    }  # fmt: skip
    write_text_atomically(out / FACTS, json.dumps(facts, indent=1) + "\n")


def _record(asked: SelfCalibration, folder: CalibrationFolder, out: Path) -> list[list[int]]:
    """Record prompts, which are chosen while the server that records them starts; returns them."""

    def choose() -> list[list[int]]:
        chosen = _prompts(asked, settings)
        _check_room(asked.task, out, chosen)
        return chosen

    settings, missing = _settings(asked.task), threading.Event()
    with ThreadPoolExecutor(1) as beside:
        prompts = beside.submit(choose)
        prompts.add_done_callback(lambda done: missing.set() if done.exception() else None)
        how = DumpTask(settings, folder.path, server_args=_server_args(asked.task))
        try:
            record_prompts(how, folder, prompts.result, missing)
        except ServerFailedError:
            if missing.is_set():
                prompts.result()  # says why
            raise
        return prompts.result()


def _settings(task: Task) -> ModelSettings:
    """Of the recording server; the table's are for benchmarks."""
    return model_settings(task.model).overridden(
        model=task.model, tp_dump=1, gpu="", server_args=(), trust_remote_code=task.trust_remote_code
    )


def _server_args(task: Task) -> tuple[str, ...]:
    """Flags of the recording server beside those of every dump: it computes prompts, and decodes nothing. What is
    compiled on the way, its first prompt waits for as well as a request of SGLang's own before it."""
    flags = [*task.flags, "--max-total-tokens", str(POOL_TOKENS), "--disable-cuda-graph", "--skip-server-warmup"]
    if not has_gpu() and task.attention_sinks:
        flags += ["--attention-backend", "intel_amx"]  # the only one on a CPU that SGLang lets them have
    return tuple(flags)


def _prompts(asked: SelfCalibration, settings: ModelSettings) -> list[list[int]]:
    task = asked.task
    tokenizer = load_tokenizer(settings.overridden(model=task.tokenizer))
    longest = min(LONGEST_PROMPT, task.wanted.context - ROOM)
    if longest < 2:
        raise DataError(f"{task.model}: a context of {task.wanted.context} tokens has no room for a prompt")
    if asked.text is not None:
        return choose_prompts(tokenizer, calibration_chats(str(asked.text)), asked.tokens, longest)
    return shipped_text.prompts(tokenizer, asked.tokens, longest)


def _check_room(task: Task, out: Path, prompts: list[list[int]]) -> None:
    """Refuse before minutes of work what would fill the disk.

    Raises:
        DataError: naming the folder.
    """
    needed = sum(map(len, prompts)) * task.token_bytes
    free = shutil.disk_usage(out).free
    if free < needed:
        raise DataError(
            f"{out}: recording takes {needed / 1e9:.1f} GB there, {free / 1e9:.1f} GB are free; set SGLANG_OSCAR_CACHE "
            "to a folder on a larger disk"
        )


def _fit(task: Task, dump: Path, out: Path) -> list[Path]:
    wanted, recipe = task.wanted, FITTED[task.wanted.recipe]
    goal = BitGoal.parse(wanted.bits) if "bits" in recipe.options else None
    options = FitOptions(
        group_size=wanted.group_size, context=wanted.context, bits=goal, key_coding=wanted.key_coding,
        value_coding=wanted.value_coding,
    )  # fmt: skip
    # The first GPU of the server: others may be somebody else's.
    device = f"cuda:{task.gpu}" if has_gpu() else "cpu"
    with fitting() as progress:
        result = recipe.run(FitRequest(dump, options, task.checkpoint, device, progress=progress))
    for remark in result.remarks:
        print(f"note: {remark}", flush=True)
    print(result.summary, flush=True)
    return result.save(out, result.usual_formats(recipe.suffixes))
