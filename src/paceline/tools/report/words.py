"""Figures with units, in as many digits as mean something."""


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


def size(nbytes: float) -> str:
    """A number of bytes."""
    for unit in ("B", "KiB", "MiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"


def ranks(numbers: "list[int]") -> str:
    """Some ranks, as one says them: those that follow each other together."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    said = [f"{run[0]} to {run[-1]}" if len(run) > 2 else " and ".join(map(str, run)) for run in runs]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(said)}"
