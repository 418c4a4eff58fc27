"""What a page of the documentation has its reader do: files to write, commands to run, output to see."""

import re
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(
    r"(?:^<!-- file: (?P<file>\S+) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)
COMMENT = re.compile(r"\s+#\s+(?P<comment>.*)$")
EXITS = re.compile(r"exits with (\d+)")
ROOT = Path(__file__).parents[2]
MENTIONED = re.compile(r"`((?:make|python|sudo|paceline \w+) [^`]*)`")
NUMBER = re.compile(r"\d+(?:[.,:]\d+)*")


@dataclass(frozen=True)
class Command:
    """A line of a shell block, the exit code it is to have, and lines that its block is to print."""

    line: str
    code: int
    shown: tuple[str, ...]


def link_repository(folder: Path) -> Path:
    """A folder that has the files of this repository, but nothing that was built."""
    folder.mkdir()
    for path in ROOT.iterdir():
        if path.name not in ("build", ".git"):
            (folder / path.name).symlink_to(path)
    return folder


def files(page: Path) -> dict[str, str]:
    """The scripts that the reader is to save, by name."""
    return {found["file"]: found["text"] for found in FENCE.finditer(page.read_text()) if found["file"]}


def commands(page: Path) -> list[Command]:
    """The lines of the page's shell blocks; the last of a block prints what the next block shows."""
    told: list[Command] = []
    for found in FENCE.finditer(page.read_text()):
        match found["language"]:
            case "sh":
                told += [_command(line) for line in found["text"].splitlines() if line.strip()]
            case "text":
                told[-1] = Command(told[-1].line, told[-1].code, tuple(found["text"].splitlines()))
    return told


def mentioned(page: Path) -> list[str]:
    """Commands inside sentences and tables."""
    return sorted(set(MENTIONED.findall(FENCE.sub("", page.read_text()))))


def _command(line: str) -> Command:
    comment = COMMENT.search(line)
    code = EXITS.search(comment["comment"]) if comment else None
    return Command(COMMENT.sub("", line), int(code[1]) if code else 0, ())


def is_shown(line: str, output: str) -> bool:
    """Whether the output has the line, up to its numbers and to what an ellipsis stands for."""
    pattern = NUMBER.sub("<number>", line.strip())
    pattern = re.escape(pattern).replace("<number>", r"[\d.,:]+").replace("…", ".*")
    return re.search(pattern, output) is not None
