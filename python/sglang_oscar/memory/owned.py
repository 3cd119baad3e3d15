"""What a request owns, as one record: printed, saved, loaded, freed and hashed in one way, whatever it consists of.

Rooms say which memory requests own units of (:attr:`sglang_oscar.attach.feature.Feature.owns`). Retraction, transfer to
another server and copies beside states ask the record, so what is registered once goes with a request everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_oscar.memory.units import Units

RING, SINK, ROW, STATE = "ring", "sink block", "row of history", "state"


@dataclass(frozen=True, kw_only=True, eq=False)
class Holding:
    """A kind of memory that requests own units of.

    Args:
        units: the memory.
        of: (seat in SGLang's request pool, tokens that are computed) numbers of the units of the request in it.
        carried: whether what is in them goes along when a request leaves its seat and goes on later, here or on another
            server; there is one for each seat. Otherwise SGLang moves it, or it is found again by what it is.
        in_pages: whether SGLang's slots are units, which it sends to another server by itself, as pages.
        free: (number) gives a unit back, where SGLang does not.
        copies: the last so many units lie beside the kept states of a hybrid model, by state slot.
        on_device: (int64 [requests] seats) ``of`` of several requests with a unit each, as the device knows it.
    """

    units: Units
    of: Callable[[int, int], Sequence[int]]
    carried: bool = False
    in_pages: bool = False
    free: Callable[[int], None] | None = None
    copies: int = 0
    on_device: Callable[[torch.Tensor], torch.Tensor] = lambda seats: seats

    @property
    def beside(self) -> Units:
        """The units beside states."""
        return Units([group[:, group.shape[1] - self.copies :] for group in self.units.groups])


@dataclass(frozen=True)
class Owned:
    """What the request in ``seat`` of SGLang's request pool owns, ``tokens`` of which are computed."""

    seat: int
    tokens: int
    holdings: Mapping[str, Holding]

    def save(self) -> dict[str, list[torch.Tensor]]:
        """Copy to the host what the request takes along. The device has finished what writes to it."""
        carried = {name: of for name, of in self.holdings.items() if of.carried}
        return {name: [data.cpu() for data in of.units.read(self._numbers(of))] for name, of in carried.items()}

    def load(self, saved: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Put what was saved, of this request or another, where this one has it."""
        for name, data in saved.items():
            self.holdings[name].units.write(self._numbers(self.holdings[name]), data)

    def free(self) -> None:
        """Give back what SGLang does not."""
        for of in self.holdings.values():
            if of.free is not None:
                for unit in of.of(self.seat, self.tokens):
                    of.free(unit)

    def digests(self) -> dict[str, str]:
        """Of what is in the units, by holding: equal for equal content, wherever it lies."""
        return {name: of.units.digest(self._numbers(of)) for name, of in self.holdings.items()}

    def __str__(self) -> str:
        """As "seat 3 with 130 tokens: ring [3] of 73728 bytes, ..."."""
        held = []
        for name, of in self.holdings.items():
            units = list(of.of(self.seat, self.tokens))
            which = str(units) if len(units) < 4 else f"[{units[0]} ... {units[-1]}]"
            held.append(f"{name} {which} of {len(units) * of.units.unit_bytes} bytes")
        return f"seat {self.seat} with {self.tokens} tokens: {', '.join(held)}"

    def _numbers(self, of: Holding) -> torch.Tensor:
        device = of.units.groups[0].device if of.units.groups else "cpu"
        return torch.tensor(of.of(self.seat, self.tokens), dtype=torch.int64, device=device)


def by_slot(buffers: Sequence[torch.Tensor], req_to_token: torch.Tensor, carried: bool = False) -> Holding:
    """A unit for every token: its slot in ``buffers`` [slots, ...], by ``req_to_token`` int32 [seats, max_len].
    ``carried`` where SGLang leaves it behind when a request is retracted."""
    units = Units([buffer[None] for buffer in buffers])
    return Holding(
        units=units, of=lambda seat, tokens: req_to_token[seat, :tokens].tolist(), carried=carried, in_pages=True
    )


def of_every_server(built: Any) -> dict[str, Holding]:
    """Ring, sink block and rows of history, of a :class:`sglang_oscar.memory.build.Built`."""
    cache, seats, buffers = built.cache, built.cache.seats, built.cache.window_buffers
    return {
        RING: Holding(
            units=Units(buffers.rings), of=lambda seat, tokens: [seat], carried=True, copies=cache.plan.copies
        ),
        SINK: Holding(
            units=Units(buffers.sinks),
            of=lambda seat, tokens: [seats.block_of(seat)] if seats.block_of(seat) else [],
            free=cache.sinks.release,
            copies=cache.plan.copies,
            on_device=lambda of: seats.sink_block[of].long(),
        ),
        ROW: by_slot([*built.pool.k_buffer, *built.pool.v_buffer], cache.req_to_token_pool.req_to_token),
    }
