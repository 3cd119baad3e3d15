"""Make what the GPU tests compare with: rotations of the reference model, and the CPU server's answers.

Run it where there is no GPU: ``python test/gpu/make_answers.py``. It takes about ten minutes on two cores.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from oscar_cpu.server import has_gpu
from oscar_rotation.files.rotation_file import read_rotation_file, save_rotation_file
from support import golden
from support.reference import MODEL, fit_rotations
from support.servers import serve


def main() -> None:
    if has_gpu():
        raise SystemExit("the answers to compare with are those of the CPU server; hide the GPU")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not all(Path(path).exists() for path in golden.ROTATIONS.values()):
            for variable, path in fit_rotations(folder).items():
                save_rotation_file(golden.ROTATIONS[variable], read_rotation_file(path))
        answers = {}
        with serve(MODEL, folder / "whole.log", *golden.ARGS, *golden.WHOLE, env=golden.ROTATIONS) as server:
            answers["many"] = golden.many(server, workers=1)
            answers["conversations"] = golden.conversations(server)
        with serve(MODEL, folder / "chunked.log", *golden.ARGS, *golden.CHUNKED, env=golden.ROTATIONS) as server:
            answers["chunked"] = golden.conversations(server)
        by_layer = golden.rotations_by_layer(folder)
        with serve(MODEL, folder / "by_layer.log", *golden.ARGS, *golden.WHOLE, env=by_layer) as server:
            answers["by_layer"] = golden.conversations(server)
    golden.save(answers)
    right = [
        golden_ids["output_ids"][: golden.DIGITS] == golden.token_ids(number)
        for golden_ids, (_, number) in zip(answers["many"], golden.prompts(range(8)), strict=True)
    ]
    print(f"{golden.ANSWERS}: {golden.ANSWERS.stat().st_size} bytes, {sum(right)} of {len(right)} questions answered")


if __name__ == "__main__":
    main()
