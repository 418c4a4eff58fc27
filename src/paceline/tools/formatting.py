"""Numbers as text with a unit, with as many digits as are meaningful; and text for a terminal."""

from collections.abc import Iterable


def printable(text: str) -> str:
    """Text of unknown origin in one line, with control characters escaped, which a terminal would obey."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text
    )


def milliseconds(value: float) -> str:
    """A time, given in milliseconds."""
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
