"""Descriptors of tensor-core products that machine code builds from registers that nothing has set for them.

Hopper's wgmma reads factors from shared memory through descriptors in uniform registers. Such a descriptor follows from
the start of shared memory and from constants. One that also depends on a kernel argument, on global memory or on a
register that was never written is an error of the assembler: some launches end in an illegal memory access, others
quietly read the wrong tile. ptxas 12.8 does this where the upper half of a descriptor should be that of a
zero-extended address.

What a register may depend on is followed through the control flow: both ways of a branch count, a predicated write
leaves the old value possible. Values from shared and local memory count as fine, or a spilled register would be an
error.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from triton import knobs

INSTRUCTION = re.compile(
    r"^\s+/\*(?P<address>[0-9a-f]+)\*/\s+(?:\{\s*)?(?P<guard>@!?U?P\w+\s+)?(?P<op>[A-Z][\w.]*)\s*(?P<operands>.*?)\s*;"
)
LABEL = re.compile(r"^(\.L_x_\d+):")
REGISTER = re.compile(r"\b(U?R)(\d+)(\.64)?")
ARGUMENTS = re.compile(r"c\[0x0\]\[0x([0-9a-f]+)\]")
FIRST_ARGUMENT = 0x210
"""Constants below it are the launch's: grid, stack."""

NO_RESULT = (
    *("BAR", "BRA", "BSSY", "BSYNC", "CCTL", "DEPBAR", "ERRBAR", "EXIT", "FENCE", "FSETP", "HGMMA", "ISETP", "NOP"),
    *("LDGDEPBAR", "LDGSTS", "MEMBAR", "PLOP3", "R2P", "RED", "ST", "UISETP", "UPLOP3", "WARP"),
)
"""Instructions that write no register that an address could come from."""

UNSET = frozenset({"nothing"})
State = dict[str, frozenset[str]]
"""What every register may depend on; a register that is not in it has not been written."""


@dataclass(frozen=True)
class Instruction:
    address: str
    guarded: bool
    op: str
    operands: str

    @property
    def name(self) -> str:
        return self.op.split(".")[0]

    @cached_property
    def parts(self) -> list[str]:
        """Operands but for predicates, which may stand in front of the result; that comes first otherwise."""
        parts = [part.strip() for part in re.split(r",(?![^\[]*\])", self.operands)]
        return [part for part in parts if not re.match(r"^!?U?P[T\d]$", part)]

    @cached_property
    def results(self) -> list[str]:
        """Registers that it writes."""
        parts = self.parts
        found = re.match(r"^(U?R)(\d+)", parts[0]) if parts else None
        if found is None or self.name.startswith(NO_RESULT):
            return []
        wide = ".64" in self.op and self.name in ("ULDC", "LDC", "LDG", "LDS", "LDL", "UIADD3")
        count = 4 if ".128" in self.op or ".M88.4" in self.op else 2 if wide or ".WIDE" in self.op else 1
        if self.name == "CS2R" and ".32" not in self.op:
            count = 2
        return [f"{found[1]}{int(found[2]) + offset}" for offset in range(count)]

    def origin(self, state: State) -> frozenset[str]:
        """What its results depend on."""
        if self.name == "LDG":
            return frozenset({"global memory"})
        if self.name in ("LDS", "LDL", "LDSM"):
            return frozenset()
        if any(int(at, 16) >= FIRST_ARGUMENT for at in ARGUMENTS.findall(self.operands)):
            return frozenset({"an argument"})
        return frozenset().union(*(state.get(register, UNSET) for register in self.read))

    @cached_property
    def read(self) -> set[str]:
        """Registers that its results are made of."""
        read = set()
        for kind, number, wide in REGISTER.findall(", ".join(self.parts[1:])):
            pair = 2 if wide or ".64" in self.op else 1
            read |= {f"{kind}{int(number) + offset}" for offset in range(pair)}
        return read

    @cached_property
    def descriptors(self) -> list[str]:
        """Registers of the descriptors it reads: the second pair only where the first factor is in registers."""
        if self.name != "HGMMA":
            return []
        first = int(re.search(r"gdesc\[UR(\d+)\]", self.operands)[1])
        begin = 2 if re.match(r"R\d+, R\d+", self.operands) else 0
        return [f"UR{first + offset}" for offset in range(begin, 4)]


def parse(text: str) -> tuple[list[Instruction], dict[str, int]]:
    """Instructions of a disassembly (``nvdisasm -c`` of one kernel), and the index that every label stands before."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := INSTRUCTION.match(line):
            guard, op, operands = found["guard"], found["op"], found["operands"]
            instructions.append(Instruction(found["address"], guard is not None, op, operands))
    return instructions, labels


def followers(index: int, instructions: list[Instruction], labels: dict[str, int]) -> list[int]:
    instruction = instructions[index]
    goes_on = instruction.guarded or instruction.name not in ("BRA", "EXIT")
    after = [index + 1] if goes_on and index + 1 < len(instructions) else []
    if instruction.name == "BRA":
        after.append(labels[re.search(r"\.L_x_\d+", instruction.operands)[0]])
    return after


def join(states: list[State]) -> State:
    names = set().union(*states)
    return {name: frozenset().union(*(state.get(name, UNSET) for state in states)) for name in names}


def stray_descriptors(text: str) -> list[str]:
    """A line per product whose descriptor depends on more than shared memory's start and constants.

    Args:
        text: of ``nvdisasm -c``.
    """
    instructions, labels = parse(text)
    if not instructions:
        raise ValueError("no instructions found")
    entry: dict[int, State] = {0: {}}
    joining = set(labels.values())
    work, stray = [0], {}
    while work:
        index = work.pop()
        state = dict(entry[index])
        while True:
            instruction = instructions[index]
            for register in instruction.descriptors:
                if origin := state.get(register, UNSET):
                    stray[instruction.address] = f"{instruction.address}: {register} from {', '.join(sorted(origin))}"
            origin = instruction.origin(state)
            for register in instruction.results:
                state[register] = origin | state.get(register, UNSET) if instruction.guarded else origin
            after = followers(index, instructions, labels)
            if after != [index + 1] or index + 1 in joining:
                break
            index += 1
        for target in after:
            joined = join([entry[target], state]) if target in entry else state
            if joined != entry.get(target):
                entry[target] = joined
                work.append(target)
    return [stray[address] for address in sorted(stray)]


def disassemble(cubin: Path) -> str:
    """Of a file with one kernel, by the tool that Triton brings."""
    command = [knobs.nvidia.nvdisasm.path, "-c", str(cubin)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
