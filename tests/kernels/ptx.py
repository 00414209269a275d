"""Reads compiled kernels: which values differ between the threads of a warp by a rounding, and which branches follow.

A reduction exchanges values between threads (`shfl.sync.bfly`) and adds the neighbour's to its own. Addition commutes,
so all threads end with the same bits, unless the own value is a product and the compiler fuses product and addition:
one thread then computes fma(a, b, c * d), its neighbour fma(c, d, a * b). A branch on such a value sends the threads
of a warp different ways, and the next barrier waits for ever.
"""

from __future__ import annotations

import re

INSTRUCTION = re.compile(r"^\s*(?:@!?(%\w+)\s+)?([a-z][\w.:]*)\s+([^;]*);")
REGISTER = re.compile(r"%\w+")


def uneven_branches(ptx: str) -> list[str]:
    """Return branches whose condition follows from a fused multiply-add of a value that came from another thread."""
    exchanged: set[str] = set()
    uneven: set[str] = set()
    instructions = []
    for line in ptx.splitlines():
        if (match := INSTRUCTION.match(line.strip().strip("{}"))) is None:
            continue
        guard, name, operands = match.groups()
        registers = REGISTER.findall(operands)
        instructions.append((guard, name, registers, line.strip()))
        if name.startswith("shfl.sync.bfly") and registers:
            exchanged.add(registers[0])
    size = -1
    while size != len(uneven):  # until nothing is added: loops carry values backwards
        size = len(uneven)
        for guard, name, registers, _line in instructions:
            if not registers or name.startswith(("st.", "bra", "bar.")):
                continue
            target, sources = registers[0], registers[1:]
            fused = name.startswith(("fma.", "mad.")) and ".f" in name and any(s in exchanged for s in sources)
            if fused or any(s in uneven for s in sources) or guard in uneven:
                uneven.add(target)
    return [line for guard, name, _registers, line in instructions if name.startswith("bra") and guard in uneven]
