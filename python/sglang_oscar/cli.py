"""The command ``oscar``: rotation tools, ``oscar doctor``, calibration and evaluation drivers, ``oscar prove``."""

from __future__ import annotations

from oscar_rotation.cli import app
from sglang_oscar.calibration.commands import add_driver_commands
from sglang_oscar.doctor.command import doctor
from sglang_oscar.evaluation.commands import add_evaluation_commands
from sglang_oscar.evaluation.prove.command import add_prove_command

__all__ = ["app"]

app.command("doctor")(doctor)
add_driver_commands(app)
add_evaluation_commands(app)
add_prove_command(app)
