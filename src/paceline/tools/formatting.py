"""Numbers as text, with as many digits as are meaningful; and text for a terminal.

``report/page/formatting.js`` writes numbers the same way.
"""

import math
from collections.abc import Iterable


def printable(text: str) -> str:
    """Text of unknown origin in one line, with control characters escaped, which a terminal would obey."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text
    )


def plain_number(value: float) -> str:
    """A number with three digits or more, never as a power of ten: "0.0123", "8.15", "1,012"."""
    if not value or abs(value) >= 99.5:
        return f"{value:,.0f}"
    text = f"{value:.{2 - math.floor(math.log10(abs(value)))}f}"
    return text.rstrip("0").rstrip(".")


def plural(many: float, noun: str) -> str:
    """How many there are of something: "1 step", "1,200 steps"."""
    return f"{plain_number(many)} {noun}{'' if many == 1 else 's'}"


def percent(share: float) -> str:
    """A share of a whole; with one more digit if it is small."""
    return f"{share * 100:.{1 if 0 < share < 0.1 else 0}f}%"


def milliseconds(value: float) -> str:
    """A time, given in milliseconds."""
    if not value:
        return "0 ms"
    if abs(value) >= 10_000:
        return f"{value / 1000:.1f} s"
    if abs(value) >= 100:
        return f"{value:.0f} ms"
    if abs(value) >= 10:
        return f"{value:.1f} ms"
    if abs(value) >= 0.1:
        return f"{value:.2f} ms"
    return f"{value * 1000:.0f} µs"


def byte_size(nbytes: float) -> str:
    """A number of bytes."""
    for unit in ("B", "KiB", "MiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"


def rank_list(numbers: Iterable[int]) -> str:
    """Some ranks, with consecutive ones as a range: "ranks 0 to 2, 5"."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    texts = [f"{each[0]} to {each[-1]}" if len(each) > 2 else " and ".join(map(str, each)) for each in ranges]
    return f"rank{'s' if sum(map(len, ranges)) > 1 else ''} {', '.join(texts)}"
