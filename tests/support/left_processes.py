"""Whether processes have ended."""

from paceline.tools.run.processes import read_process


def is_running(pid: int) -> bool:
    """Whether a process is there and has not ended; an orphan that has ended may never be waited for."""
    return (process := read_process(pid)) is not None and process.state not in "ZX"
