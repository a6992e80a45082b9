"""The search for registers that a product in flight still needs, on machine code that was wrong once."""

import pytest

from experiments.machine_code.hazards import find

FAULTY = """
        /*7380*/                   HGMMA.64x64x16.F32.BF16 R24, R152, gdesc[UR44].tnspB, RZ, !UPT ;
        /*73b0*/                   HGMMA.64x64x16.F32.BF16 R24, R120, gdesc[UR8].tnspB, R24, gsb0 ;
        /*73c0*/                   IMAD.MOV.U32 R122, RZ, RZ, 0x3f803f80 ;
        /*7420*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*7430*/                   MUFU.EX2 R16, R24 ;
"""


def test_an_operand_rewritten_under_a_product_is_found():
    count, (hazard,) = find(FAULTY.splitlines())
    assert count == 2
    assert (hazard.address, hazard.product, hazard.what) == ("73c0", "73b0", "writes the left operand")


@pytest.mark.parametrize(
    ("instruction", "what"),
    [
        ("FADD R1, R30, R2", "reads the sum"),
        ("FMUL R55, R1, R2", "writes the sum"),
        ("LDSM.16.M88.4 R118, [R12]", "writes the left operand"),
        ("STSM.16.M88.4 [R12], R22", "reads the sum"),
        ("@!P0 IMAD.WIDE.U32 R22, R1, R2, R4", None),
        ("STS.64 [R1+0x1a8e0], R22", None),
        ("FMUL R56, R152, R121", None),
        ("UMOV UR11, UR19", None),
    ],
)
def test_what_touches_which_register(instruction, what):
    text = FAULTY.replace("IMAD.MOV.U32 R122, RZ, RZ, 0x3f803f80", instruction)
    assert {hazard.what for hazard in find(text.splitlines())[1]} == ({what} if what else set())


def test_a_wait_for_some_leaves_the_others_in_flight():
    one = "/*00{}0*/ HGMMA.64x64x16.F32.BF16 R{}, gdesc[UR8], RZ, !UPT, gsb0 ;"
    lines = [
        one.format(1, 24),
        one.format(2, 88),
        "/*0030*/ WARPGROUP.DEPBAR.LE gsb0, 0x1 ;",
        "/*0040*/ FADD R1, R24, R2 ;",
        "/*0050*/ FADD R1, R88, R2 ;",
    ]
    ((hazard,),) = find(lines)[1:]
    assert (hazard.address, hazard.product) == ("0050", "0020")
