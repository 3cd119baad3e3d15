"""The command ``oscar``: rotation tools, ``oscar doctor``, ``oscar bench``, ``oscar try-class``, ``oscar run``,
calibration and evaluation drivers, ``oscar prove``."""

from __future__ import annotations

from oscar_rotation.cli import app
from oscar_tools.bench.command import bench
from oscar_tools.calibration.commands import add_driver_commands
from oscar_tools.doctor.command import doctor
from oscar_tools.evaluation.commands import add_evaluation_commands
from oscar_tools.evaluation.prove.command import add_prove_command
from oscar_tools.run_program import run
from oscar_tools.trial.command import try_class

__all__ = ["app"]

app.command("doctor")(doctor)
app.command("bench")(bench)
app.command("try-class")(try_class)
# Everything behind the module is the program's, --help included.
app.command("run", context_settings={"allow_extra_args": True, "allow_interspersed_args": False})(run)
add_driver_commands(app)
add_evaluation_commands(app)
add_prove_command(app)
