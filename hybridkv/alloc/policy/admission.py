"""How much room the admission of a waiting request must leave: headroom H = floor(f * B) in every pool.

A feasibility condition, not an allocation: free and reclaimable pages count alike, and running requests are not
subject to it (section 3.1 of the memory-organization reference).
"""

from __future__ import annotations

import math
from fractions import Fraction

from hybridkv.errors import UsageError


def headroom_pages(fraction: float | str | Fraction, pages: int) -> int:
    """floor(f * B) in exact arithmetic: .29 of 100 pages is 29, which binary floating point makes 28."""
    return math.floor(exact_fraction(fraction) * pages)


def exact_fraction(value: float | str | Fraction) -> Fraction:
    """The decimal that was written, in [0, 1)."""
    try:
        fraction = Fraction(str(value))
    except ValueError:
        raise UsageError(f"headroom must be a number in [0, 1), got {value!r}") from None
    if not 0 <= fraction < 1:
        raise UsageError(f"headroom must be in [0, 1), got {value}")
    return fraction
