"""Options that several commands share, written down once.

A command takes a group as one parameter; :func:`with_groups` shows its fields to typer as options of the command::

    @dataclass(frozen=True)
    class Colours:
        ink: Annotated[str, typer.Option(envvar="INK")] = "black"

    @with_groups
    def draw(shape: str, colours: Colours) -> None: ...        # draw --ink red SHAPE
"""

from __future__ import annotations

import functools
import inspect
import shlex
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from oscar_rotation.files.identity import named_model
from oscar_rotation.model_table import TRUST, ModelSettings, model_settings
from oscar_tools.calibration.data import LocalData, dataset_label, local_data_sets
from oscar_tools.calibration.folders import CalibrationFolder, latest_calibration

ROOT = Path("rotation")


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters that are dataclasses are replaced by the fields of these."""
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type] = {}
    for parameter in inspect.signature(command).parameters.values():
        hint = hints[parameter.name]
        if not is_dataclass(hint):
            parameters.append(parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        assert isinstance(hint, type)
        groups[parameter.name] = hint
        of_fields = get_type_hints(hint, include_extras=True)
        parameters += [
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=of_fields[f.name])
            for f in fields(hint)
        ]

    @functools.wraps(command)
    def wrapped(**values: Any) -> None:
        made = {
            name: group(**{f.name: values.pop(f.name) for f in fields(group)})  # type: ignore[arg-type]
            for name, group in groups.items()
        }
        command(**values, **made)

    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapped


NAME = Annotated[str, typer.Argument(help="Folder name of the model table, hub id or path.")]
TOKENS = Annotated[int | None, typer.Option(envvar="DUMP_KVCACHE_TOKENS", min=1, help="Calibration tokens.")]


@dataclass(frozen=True)
class CalibrationOptions:
    """Which calibration of a model: where it lies and what it was made of."""

    root: Annotated[Path, typer.Option(envvar="OSCAR_ROOT", help="Where <model>/<DATASET>/... are.")] = ROOT
    dataset: Annotated[str, typer.Option(envvar="DATASET", help="GPQA, MMLU, WikiText or a local .jsonl.")] = "GPQA"
    group_size: Annotated[
        int | None, typer.Option(envvar="GROUP_SIZE", min=1, help="Channels per quantization group.")
    ] = None

    def latest(self, settings: ModelSettings, tokens: int | None = None) -> CalibrationFolder:
        """The calibration with the newest complete dump, of so many tokens if given.

        Raises:
            DumpError: there is none.
        """
        label = dataset_label(self.dataset)
        return latest_calibration(self.root, settings.name, label, tokens, settings.group_size)


@dataclass(frozen=True)
class ServerOptions:
    """How servers of a model are started.

    Raises:
        typer.BadParameter: further flags with a quote that does not end.
    """

    model: Annotated[
        str | None, typer.Option(envvar="MODEL", help="Another hub id, path or folder name for this model.")
    ] = None
    tp: Annotated[int | None, typer.Option(envvar="TP_SIZE", min=1, help="Tensor parallelism.")] = None
    gpu: Annotated[str | None, typer.Option(envvar="GPU", help="CUDA_VISIBLE_DEVICES.")] = None
    server_args: Annotated[
        str, typer.Option(envvar="SERVER_ARGS", help="Further flags for every server, quoted as in a shell.")
    ] = ""
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            TRUST,
            envvar="TRUST_REMOTE_CODE",
            help="Let Python code of the model's repository run, here and in servers.",
        ),
    ] = False

    def __post_init__(self) -> None:
        try:
            shlex.split(self.server_args)
        except ValueError as error:
            raise typer.BadParameter(f"{error} in {self.server_args!r}", param_hint="--server-args") from error

    @property
    def flags(self) -> tuple[str, ...]:
        """The further flags, one by one; trust is among the settings."""
        return tuple(flag for flag in shlex.split(self.server_args) if flag != TRUST)

    def settings(self, name: str, group_size: int | None) -> ModelSettings:
        """The table's settings of a model with what the user changed."""
        # The scripts export MODEL, which may be a folder name of the table, and no server knows those.
        model = settings_of(self.model).model if self.model else None
        trusted = self.trust_remote_code or TRUST in shlex.split(self.server_args)
        return settings_of(name).overridden(
            model=model, group_size=group_size, gpu=self.gpu, tp_dump=self.tp, tp_eval=self.tp,
            trust_remote_code=trusted or None,
        )  # fmt: skip


def settings_of(name: str) -> ModelSettings:
    """The table's settings of a model.

    Args:
        name: as in the table, a hub id or a path.

    Raises:
        typer.BadParameter: it is empty.
    """
    if not name.strip():
        raise typer.BadParameter("is empty; give a folder name of the table, a hub id or a path", param_hint="name")
    return model_settings(named_model(name))


@dataclass(frozen=True)
class DataOptions:
    """Calibration data that is not fetched from the hub."""

    dataset_path: Annotated[
        str,
        typer.Option(envvar="DATASET_PATH", help="Local copy of the data set; or name=path, with commas."),
    ] = ""

    def local(self, dataset: str) -> LocalData:
        """Data set -> local copy.

        Raises:
            typer.BadParameter: a name that is no data set of the hub.
        """
        try:
            return local_data_sets(self.dataset_path, dataset)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--dataset-path") from error
