"""A dump through an ordinary server, from a model and a data set to ``qkv_dumps``."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oscar_cpu.server import OUR_PREFIXES, environment, has_gpu
from oscar_rotation.atomic import write_text_atomically
from oscar_rotation.dump.layout import TOKENS_NAME
from oscar_rotation.errors import DumpError
from oscar_rotation.model_table import ModelSettings
from oscar_tools.calibration.data import Chat, LocalData, calibration_chats, dataset_label, render_chat
from oscar_tools.calibration.dump_origin import ACTIVATIONS, COVARIANCES, check_origin, dump_origin, write_origin
from oscar_tools.calibration.errors import DataError, server_message
from oscar_tools.calibration.folders import CalibrationFolder, dump_state, held
from oscar_tools.calibration.model_files import context_length, load_config, load_tokenizer, model_overrides
from oscar_tools.calibration.progress import stepping
from oscar_tools.local_server import LocalServer, ServerFailedError, serve

LONGEST_PROMPT = 8192
"""Tokens; a prompt must fit into one prefill chunk to be recorded whole."""
ROOM = 16
"""Tokens of the context that a prompt leaves free: for the one that is generated, and a few that SGLang keeps back."""


@dataclass(frozen=True)
class DumpTask:
    """What to dump; ``dataset`` as in :func:`calibration_chats`, ``covariances`` streams."""

    settings: ModelSettings
    root: Path
    dataset: str = "GPQA"
    tokens: int = 30000
    local: LocalData = field(default_factory=dict)
    covariances: bool = False
    server_args: tuple[str, ...] = ()

    @property
    def mode(self) -> str:
        """What is written."""
        return COVARIANCES if self.covariances else ACTIVATIONS


def server_environment(settings: ModelSettings, extra: dict[str, str]) -> dict[str, str]:
    """The process's environment without settings of earlier runs, made fit for this machine and these GPUs."""
    env = environment({k: v for k, v in os.environ.items() if not k.startswith(OUR_PREFIXES)})
    if settings.gpu and has_gpu():
        env["CUDA_VISIBLE_DEVICES"] = settings.gpu
    return env | extra


def plain_backend(args: Sequence[str]) -> list[str]:
    """The attention backend an ordinary server needs on a machine without a GPU."""
    return [] if has_gpu() or "--attention-backend" in args else ["--attention-backend", "torch_native"]


def encode(tokenizer: Any, prompt: Chat | str) -> list[int]:
    """Token ids of a prompt; chats go through the model's template, or are joined where it has none.

    Raises:
        DataError: see :func:`render_chat`.
    """
    if isinstance(prompt, str):
        return list(tokenizer.encode(prompt))
    if getattr(tokenizer, "chat_template", None):
        text = render_chat(tokenizer, prompt, add_generation_prompt=True)
        return list(tokenizer.encode(text, add_special_tokens=False))
    return list(tokenizer.encode("\n\n".join(message["content"] for message in prompt)))


def longest_prompt(task: DumpTask) -> int:
    """Tokens of a prompt at most: one prefill chunk, less where the model or the user's flags allow no such context.

    Raises:
        DataError: the configuration cannot be had, or the context has no room for a prompt.
    """
    settings = task.settings
    context = context_length(load_config(settings), [*settings.server_flags, *task.server_args])
    if context is not None and context <= ROOM:
        raise DataError(f"{settings.model}: a context of {context} tokens has no room for a prompt")
    return LONGEST_PROMPT if context is None else min(LONGEST_PROMPT, context - ROOM)


def choose_prompts(
    tokenizer: Any, prompts: Iterable[Chat | str], tokens: int, longest: int = LONGEST_PROMPT
) -> list[list[int]]:
    """Prompts in order until they hold ``tokens`` tokens, each cut to ``longest``; the last one is cut to fit.

    Raises:
        DataError: the data set holds no prompt, or one that the model's template does not take.
    """
    chosen: list[list[int]] = []
    total = 0
    for number, prompt in enumerate(prompts, 1):
        try:
            ids = encode(tokenizer, prompt)[: min(longest, tokens - total)]
        except DataError as error:
            raise DataError(f"prompt {number}: {error}") from None
        if ids:
            chosen.append(ids)
            total += len(ids)
        if total >= tokens:
            return chosen
    if not chosen:
        raise DataError("the data set holds no prompt")
    return chosen


def run_dump(task: DumpTask) -> CalibrationFolder:
    """Dump, unless it was done before; a broken dump of an earlier run is removed first.

    A dump in the same folder that is known to be of other prompts or weights, or of the other mode, is refused.

    Returns:
        the calibration folder, its dump complete.

    Raises:
        DataError: the data set or the tokenizer cannot be had, or the server recorded too little.
        DumpError: the folder holds a dump of something else, or another process is filling it.
        OSError: a file of the model cannot be read.
        ServerFailedError: the server did not start, ended, or refused a prompt.
    """
    settings = task.settings
    tokenizer = load_tokenizer(settings)
    chats = calibration_chats(task.dataset, task.local.get(task.dataset))
    prompts = choose_prompts(tokenizer, chats, task.tokens, longest_prompt(task))
    if (found := sum(map(len, prompts))) < task.tokens:
        print(f"note: {task.dataset} holds {found} tokens, not the {task.tokens} asked for")
    label = dataset_label(task.dataset)
    folder = CalibrationFolder.of(task.root, settings.name, label, task.tokens, len(prompts), settings.group_size)
    with alone_in(folder.dump):
        record(task, folder, prompts)
    return folder


@contextmanager
def alone_in(dump: Path) -> Iterator[None]:
    """While inside, no other process makes this dump: its unfinished files would look like an interrupted one's.

    Raises:
        DumpError: another one does.
    """
    taken = DumpError(f"{dump}: another process is making this dump; wait until it is done")
    with held(dump.parent / f".{dump.name}.lock", taken):
        yield


def record(task: DumpTask, folder: CalibrationFolder, prompts: list[list[int]]) -> None:
    """Dump prompts, token ids each, into a folder that nobody else fills.

    Raises:
        DataError, DumpError, OSError, ServerFailedError: as :func:`run_dump`.
    """
    settings = task.settings
    overrides = model_overrides([*settings.server_flags, *task.server_args])
    origin = dump_origin(settings.model, prompts, task.mode, overrides)
    state = dump_state(folder.dump)
    if state == "complete":
        if remark := check_origin(folder.dump, origin):
            print(f"note: {remark}")
        print(f"{folder.dump} is complete and reused")
        return
    if state == "interrupted":
        print(f"{folder.dump} is what an interrupted dump left; starting over")
        shutil.rmtree(folder.dump)
    # Before the server starts: a dump that is complete always has it.
    write_origin(folder.dump, origin)
    record_prompts(task, folder, lambda: prompts)


def record_prompts(
    task: DumpTask,
    folder: CalibrationFolder,
    prompts: Callable[[], list[list[int]]],
    given_up: threading.Event | None = None,
) -> None:
    """Dump prompts that are asked for when the server is ready, into a folder without a dump.

    Args:
        task: how; its tokens and data are no matter here.
        folder: of the dump.
        prompts: token ids of each.
        given_up: set by another thread where there will be none.

    Raises:
        DataError, OSError, ServerFailedError: as :func:`run_dump`; what ``prompts`` raises.
    """
    settings = task.settings
    env = {
        "DUMP_KVCACHE": "1",
        "DUMP_KVCACHE_DIR": str(folder.dump.resolve()),
        "DUMP_KVCACHE_MODE": task.mode,
    }
    args = ["--tensor-parallel-size", str(settings.tp_dump), "--chunked-prefill-size", str(LONGEST_PROMPT)]
    args += [*settings.server_flags, *plain_backend(task.server_args), *task.server_args]
    log = folder.path / "dump_server.log"
    print(f"starting a server that records; its log: {log}", flush=True)
    with serve(settings.model, log, args, server_environment(settings, env), given_up=given_up) as server:
        chosen = prompts()
        tokens = sum(map(len, chosen))
        write_text_atomically(folder.dump / TOKENS_NAME, str(tokens))
        print(f"dumping {tokens} tokens of {len(chosen)} prompts", flush=True)
        # One at a time: prompts that share a prefill may be split over two chunks, and only the first is recorded.
        for number, ids in enumerate(stepping(chosen, "recording", "prompts"), 1):
            prefill(server, ids, f"prompt {number} of {len(chosen)}")
    if dump_state(folder.dump) != "complete":
        raise DataError(f"{folder.dump}: the server recorded less than was asked for; see {log}")


def prefill(server: LocalServer, ids: list[int], what: str = "the prompt") -> None:
    """Let the server see a prompt, named ``what`` in errors.

    Raises:
        ServerFailedError: it refused the prompt, or did not answer.
    """
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    request = urllib.request.Request(
        f"{server.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=3600) as reply:
            reply.read()
    except urllib.error.HTTPError as error:
        said = server_message(error.read().decode(errors="replace"))
        raise ServerFailedError(
            f"the server refused {what}, {len(ids)} tokens, with status {error.code}: {said} (log: {server.log})"
        ) from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise ServerFailedError(
            f"the server did not answer to {what}, {len(ids)} tokens ({reason}); its log says why: {server.log}"
        ) from None
