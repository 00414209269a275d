"""Seeds of the choices of one request."""

from __future__ import annotations

_MASK = 2**64 - 1


def choice_seed(seed: int, choice: int) -> int:
    """The seed of choice `choice`: the request's own for the first, else mixed with it (splitmix64, Steele et al.
    2014), so that neighbouring seeds do not share draws."""
    if choice == 0:
        return seed
    mixed = (seed + choice * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return (mixed ^ (mixed >> 31)) >> 1
