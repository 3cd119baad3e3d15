"""The command ``oscar try-class``."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Annotated

import typer

BODY = "from oscar_tools.trial.command import body; body()"


def try_class(
    model: Annotated[str, typer.Argument(help="Folder, or name on the hub, of a model of the class; weights unread.")],
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model that is tried.")] = 2,
) -> None:
    """Try whether int2 mode answers as stock SGLang does with a model's class: few layers, random weights, on the CPU.

    The line printed says by how much log probabilities differ with rows of 16 bits, of what another text changes. The
    status is 1 where that is too much.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # read when torch is imported
    from oscar_cpu.server import environment

    done = subprocess.run([sys.executable, "-c", BODY, model, str(layers)], env=environment(), check=False)
    raise typer.Exit(done.returncode)


def body() -> None:
    """Body of the process that runs the trial, in the environment of a CPU server."""
    from oscar_tools.trial import trial

    model, layers = sys.argv[1:]
    trial.warm_up()
    outcome = trial.try_model(model, ["--json-model-override-args", f'{{"num_hidden_layers": {layers}}}'])
    print(f"{model}: {'passed' if outcome.passed else 'failed'}: {outcome}")
    sys.exit(0 if outcome.passed else 1)
