"""The search for wrong tensor-core descriptors, on machine code written for it."""

from __future__ import annotations

import pytest
from machine_code import stray_descriptors

HEAD = """
        /*0000*/                   S2UR UR4, SR_CgaCtaId ;
        /*0010*/                   UMOV UR5, 0x400 ;
        /*0020*/                   ULEA UR6, UR4, UR5, 0x18 ;
        /*0030*/                   ULDC.64 UR8, c[0x0][0x210] ;
"""
PRODUCT = """
        /*0100*/                   HGMMA.64x32x16.F32 R72, R40, gdesc[UR8].tnspB, R72, gsb0 ;
        /*0110*/                   EXIT ;
"""
LOW = "        /*0040*/                   USHF.R.U32.HI UR10, URZ, 0x4, UR6 ;\n"
HIGH = "        /*0050*/                   UMOV UR11, 0x80000020 ;\n"


def test_shared_memory_and_constants_make_a_descriptor() -> None:
    """The first pair is that of the other factor, which is in registers: nothing reads it."""
    assert stray_descriptors(HEAD + LOW + HIGH + PRODUCT) == []


@pytest.mark.parametrize(
    ("instruction", "origin"),
    [
        ("", "nothing"),
        ("UIADD3.X UR11, UR7, -0x7fffffe0, URZ, UP1, !UPT ;", "nothing"),
        ("UIADD3.X UR11, UR9, -0x7fffffe0, URZ, UP1, !UPT ;", "an argument"),
        ("@UP0 UMOV UR11, 0x80000020 ;", "nothing"),
    ],
)
def test_a_register_that_nothing_has_set_is_found(instruction: str, origin: str) -> None:
    """Nothing at all, the carry onto a register without a value or with an address, and what may not be done."""
    line = f"        /*0050*/                   {instruction}\n" if instruction else ""
    assert stray_descriptors(HEAD + LOW + line + PRODUCT) == [f"0100: UR11 from {origin}"]


def test_what_memory_says_is_followed_through_registers() -> None:
    loaded = """
        /*0050*/                   LDG.E R2, desc[UR8][R4.64] ;
        /*0060*/                   IADD3 R3, R2, 0x1, RZ ;
        /*0070*/                   R2UR UR11, R3 ;
    """
    assert stray_descriptors(HEAD + LOW + loaded + PRODUCT) == ["0100: UR11 from global memory"]


def test_what_a_result_was_before_does_not_count() -> None:
    """A predicate may stand in front of the result."""
    shuffled = """
        /*0050*/                   LDG.E R2, desc[UR8][R4.64] ;
        /*0060*/                   S2R R3, SR_TID.X ;
        /*0070*/                   SHFL.IDX PT, R2, R3, RZ, 0x1f ;
        /*0080*/                   R2UR UR11, R2 ;
    """
    assert stray_descriptors(HEAD + LOW + shuffled + PRODUCT) == []


def test_either_way_of_a_branch_counts() -> None:
    """Set on one way only; and a loop that sets it behind the product does so too late for the first time."""
    branch = "        /*0045*/              @P0 BRA `(.L_x_0) ;\n" + HIGH + ".L_x_0:\n"
    assert stray_descriptors(HEAD + LOW + branch + PRODUCT) == ["0100: UR11 from nothing"]
    loop = ".L_x_1:\n" + PRODUCT.splitlines()[1] + "\n" + HIGH + "        /*0120*/              @P0 BRA `(.L_x_1) ;\n"
    assert stray_descriptors(HEAD + LOW + loop + "        /*0130*/                   EXIT ;\n") == [
        "0100: UR11 from nothing"
    ]
    assert stray_descriptors(HEAD + LOW + HIGH + loop + "        /*0130*/                   EXIT ;\n") == []


def test_no_machine_code_is_an_error() -> None:
    with pytest.raises(ValueError, match="no instructions"):
        stray_descriptors("")
