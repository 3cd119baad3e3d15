"""Whether a run that was begun, or finished, earlier is the one that is asked for now."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oscar_tools.calibration.errors import HarnessError

RESULT, TASK = "result.json", "task.json"
SNAPSHOT = Path("configs/task_config.yaml")
"""What the harness leaves once a run has begun; before that there is nothing to resume."""

SERVER = "server"
"""Key of a task that the harness does not see: model, flags, variables and rotations of the server, and the data."""

PASSING = ("api_url", "use_cache", "rerun_review", "work_dir", "eval_batch_size")
"""What may differ between the attempts of one run: a server has another port every time, a folder may be moved, and
more or fewer requests in flight change how long it takes."""
FIRST = ("model", "model_id", SERVER)
"""What says most about a difference is told before the rest."""
REMEDY = "remove the folder to run it anew, or use another one (OSCAR_ROOT, or a ROT_DIR elsewhere)"


def begun(folder: Path) -> bool:
    """Whether a run left something that would be counted or continued."""
    return (folder / RESULT).exists() or (folder / SNAPSHOT).exists()


def check_same_task(folder: Path, config: dict[str, Any]) -> None:
    """Refuse to continue, or to count, a run that was begun with other settings.

    Args:
        folder: of the run; one in which nothing has begun takes any settings.
        config: the task that is asked for now.

    Raises:
        HarnessError: naming the first setting that differs, or that the run does not say its settings.
    """
    if not begun(folder):
        return
    try:
        before = dict(json.loads((folder / TASK).read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        raise HarnessError(f"{folder}: does not say of which settings its run is; {REMEDY}") from None
    if SERVER not in before:
        raise HarnessError(
            f"{folder}: is of a release that did not note rotations, clip ratios and flags of the server, so it may be "
            f"of others than yours; {REMEDY}"
        )
    # As the file has it: lists for tuples.
    now = json.loads(json.dumps(config))
    for name, old, new in _differences(_comparable(before), _comparable(now)):
        raise HarnessError(f"{folder}: was begun with {name} = {old}, now it is {new}; {REMEDY}")


def _comparable(config: dict[str, Any]) -> dict[str, Any]:
    found = {name: config[name] for name in sorted(config, key=lambda name: (name not in FIRST, name))}
    for name in PASSING:
        found.pop(name, None)
    # Staged rows lie in the run's folder; what they are is among what the server was asked with.
    found["dataset_args"] = {
        task: {name: Path(x).name if name == "local_path" else x for name, x in sorted(args.items())}
        for task, args in config.get("dataset_args", {}).items()
    }
    return found


def _differences(before: Any, now: Any, name: str = "") -> Iterator[tuple[str, str, str]]:
    """Name, old and new value of all that differs between two JSON values, in order."""
    if isinstance(before, dict) != isinstance(now, dict):
        # What is in one of them alone is told by its name, too.
        before, now = ({} if x is None else x for x in (before, now))
    if not (isinstance(before, dict) and isinstance(now, dict)):
        if before != now:
            yield name, _shown(before), _shown(now)
        return
    for key in [*now, *(key for key in before if key not in now)]:
        yield from _differences(before.get(key), now.get(key), f"{name}.{key}" if name else key)


def _shown(value: Any) -> str:
    return "unset" if value is None else json.dumps(value)[:120]
