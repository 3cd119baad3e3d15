"""Queries, keys and values of prompts that a server reads, written as a dump that a fit takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from oscar_rotation.dump.writer import DumpWriter
from oscar_rotation.errors import DumpError
from sglang_oscar.attention.call import Call
from sglang_oscar.attention.whole_prompts import whole_prompts
from sglang_oscar.features.refitting.temporary import TemporaryFolder
from sglang_oscar.formats.output_readers import reader_of


@dataclass
class Sampling:
    """One dump in progress, in a temporary folder that all ranks of the machine write to.

    Args:
        writer: of this rank.
        numbers: layer id -> number in the dump, of the layers with an INT2 cache.
        projections: output projections of these layers; none for a fit that needs none.
        budget: tokens after which nothing is added.
        changes: of weights, when it began.

    ``fault`` says why it ended early.
    """

    writer: DumpWriter
    numbers: dict[int, int]
    projections: dict[int, Any]
    budget: int
    changes: int
    tokens: int = 0
    chunk: int = 0
    sm_scale: float | None = None
    dtype: str = ""
    has_readers: bool = False
    seq_lens: list[int] = field(default_factory=list)
    selected: torch.Tensor | None = None
    fault: str = ""

    def write(self, call: Call) -> None:
        """Write the selected tokens of a layer.

        Raises:
            DumpError: heads are not those of the model.
            OSError: the folder cannot be written to.
        """
        assert self.selected is not None
        number, index = self.numbers[call.layer_id], self.selected.to(call.q.device)
        if (projection := self.projections.pop(call.layer_id, None)) is not None:
            self.writer.write_output_reader(number, reader_of(projection, call.q))
            self.has_readers = True
        self.writer.write(number, self.chunk, call.q[index], call.k[index], call.v[index], self.seq_lens, call.sinks)
        self.sm_scale, self.dtype = call.sm_scale, str(call.q.dtype).removeprefix("torch.")
        if number == len(self.numbers) - 1:
            self.tokens += sum(self.seq_lens)


class Samples:
    """Sees prompts while a :class:`Sampling` is set (:class:`sglang_oscar.memory.cache.Sampler`).

    ``files`` holds the rotation files that the last refit made, ``fresh`` those of one under way.
    """

    def __init__(self) -> None:
        self.sampling: Sampling | None = None
        self.folder: TemporaryFolder | None = None
        self.files: TemporaryFolder | None = None
        self.fresh: TemporaryFolder | None = None

    def new_folder(self) -> Path:
        """An empty temporary folder in place of the last one; rank 0 makes it."""
        self.drop()
        self.folder = TemporaryFolder()
        return self.folder.path

    def drop(self) -> None:
        """Forget what was sampled."""
        self.sampling = None
        if self.folder is not None:
            self.folder.remove()
            self.folder = None

    def begin(self, forward_batch: Any) -> bool:
        """See :class:`sglang_oscar.memory.cache.Sampler`: whole prompts only."""
        of = self.sampling
        if of is None or of.fault or of.tokens >= of.budget or not getattr(forward_batch, "rids", None):
            return False
        of.seq_lens, of.selected = whole_prompts(forward_batch)
        # Chunk 0 of a dump is a warm-up, which fits leave out.
        of.chunk += of.selected is not None
        return of.selected is not None

    def add(self, call: Call) -> None:
        """See :class:`sglang_oscar.memory.cache.Sampler`."""
        of = self.sampling
        if of is None or of.fault:
            return
        try:
            of.write(call)
        except (OSError, DumpError) as error:  # no reason for requests to fail
            of.fault = str(error)
