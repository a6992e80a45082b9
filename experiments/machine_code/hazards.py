"""Finds registers that are touched while a matrix product in flight still needs them.

Hopper's products (HGMMA) run beside the instructions after them, until a wait (WARPGROUP.DEPBAR). Until then
their left operand in registers must not be written, nor their sum read or written.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

LINE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);")
PRODUCT = re.compile(r"R(\d+), (?:R(\d+), )?gdesc")
# What writes no register of a thread, though a register may stand first.
WRITES_NONE = (
    "ST", "RED", "BAR", "BRA", "BSYNC", "BSSY", "CALL", "RET", "EXIT", "UTMA", "FENCE", "MEMBAR", "WARPSYNC",
    "SYNCS", "WARPGROUP", "DEPBAR", "NOP", "CCTL", "ERRBAR", "U", "R2UR", "VOTE",
)  # fmt: skip


class Product(NamedTuple):
    """A product in flight: where it stands, its registers, and the group that a wait counts it in."""

    address: str
    total: frozenset[int]
    left: frozenset[int]
    group: int


class Hazard(NamedTuple):
    """`what` is done by the instruction at `address` to a register of the product at `product`."""

    address: str
    product: str
    what: str
    text: str


def _registers(text: str, width: int = 1) -> frozenset[int]:
    firsts = (int(number) for number in re.findall(r"\bR(\d+)\b", text))
    return frozenset(first + more for first in firsts for more in range(width))


def _width(name: str) -> int:
    """How many registers the result takes."""
    if ".128" in name or (name.startswith(("LDSM", "STSM")) and ".4" in name):
        return 4
    return 2 if ".64" in name or ".WIDE" in name or (name.startswith("LDSM") and ".2" in name) else 1


def _read_and_written(name: str, operands: str) -> tuple[frozenset[int], frozenset[int]]:
    if name.startswith(WRITES_NONE):
        return _registers(operands, _width(name) if name.startswith("ST") else 1), frozenset()
    parts = re.split(r",(?![^\[]*\])", operands)
    while parts and re.fullmatch(r"\s*U?PT?\d?\s*", parts[0]):
        parts = parts[1:]
    if not parts:
        return frozenset(), frozenset()
    target = re.fullmatch(r"\s*(R\d+)(?:\.\w+)*\s*", parts[0])
    written = _registers(target[1], _width(name)) if target else frozenset()
    return _registers(",".join(parts[1:]), 2 if ".WIDE" in name else 1), written


def _product(address: str, name: str, operands: str, group: int) -> Product:
    columns, registers = re.search(r"64x(\d+)x", name), PRODUCT.match(operands)
    if columns is None or registers is None:
        raise ValueError(f"{address}: a product of another form: {name} {operands}")
    first, left = int(registers[1]), registers[2]
    total = frozenset(range(first, first + int(columns[1]) // 2))
    return Product(address, total, _registers(f"R{left}", 4) if left else frozenset(), group)


def find(lines: Iterable[str]) -> tuple[int, list[Hazard]]:
    """(how many products there are, what touches the registers of one in flight), from nvdisasm's text."""
    flying: list[Product] = []
    found, count, group = [], 0, 0
    for line in lines:
        if not (match := LINE.match(line)):
            continue
        address, name, operands = match.groups()
        if name.startswith("WARPGROUP.DEPBAR"):
            left = int(operands.split(",")[-1], 16)  # groups that may still be in flight
            flying = [product for product in flying if product.group >= group - left]
        elif name.startswith("HGMMA"):
            flying.append(_product(address, name, operands, group))
            count, group = count + 1, group + ("gsb0" in operands)
        else:
            read, written = _read_and_written(name, operands)
            for product in flying:
                for what, touched in (
                    ("writes the left operand", written & product.left),
                    ("writes the sum", written & product.total),
                    ("reads the sum", read & product.total),
                ):
                    if touched:
                        found.append(Hazard(address, product.address, what, f"{name} {operands}"))
    return count, found
