"""``python -m oscar_tools.calibration.on_request FOLDER < TASK``: a calibration that a server asks for."""

from __future__ import annotations

import sys
from pathlib import Path

from oscar_tools.calibration.commands import driver_errors
from oscar_tools.calibration.self_calibration import SelfCalibration, calibrate
from sglang_oscar.rotation_source.task import Task

if __name__ == "__main__":
    with driver_errors():
        calibrate(SelfCalibration(Task.decode(sys.stdin.buffer.read())), Path(sys.argv[1]))
