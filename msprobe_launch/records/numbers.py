"""Steps and ranks as people write them: `0,2,5-8`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NumberSet:
    """Numbers picked by inclusive ranges, as in `0,2,5-8`. No range at all picks every number."""

    ranges: tuple[tuple[int, int], ...] = ()

    def __contains__(self, number: int) -> bool:
        return not self.ranges or any(low <= number <= high for low, high in self.ranges)

    @classmethod
    def parse(cls, text: str) -> NumberSet:
        """Read `0,2,5-8`; an empty text picks every number. Raises ValueError with the part that is wrong."""
        return cls(tuple(_range(part.strip()) for part in text.split(",") if part.strip()))

    @property
    def last(self) -> int | None:
        """The largest number picked, or None where every number is."""
        return max(high for _, high in self.ranges) if self.ranges else None

    def count(self, total: int) -> int:
        """How many of 0..total-1 are picked."""
        return sum(number in self for number in range(total))

    def __str__(self) -> str:
        return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in self.ranges)


EVERY = NumberSet()

_NUMBER_OR_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)


def _range(text: str) -> tuple[int, int]:
    match = _NUMBER_OR_RANGE.fullmatch(text)
    if match is None:
        raise ValueError(f"'{text}' is neither a number nor a range such as 5-8")
    low, high = int(match[1]), int(match[2] or match[1])
    if low > high:
        raise ValueError(f"the range '{text}' runs backwards")
    return low, high


def spans(numbers: Iterable[int]) -> str:
    """Numbers in any order as `0-2, 7`; nothing gives an empty text."""
    found: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return ", ".join(f"{low}" if low == high else f"{low}-{high}" for low, high in found)
