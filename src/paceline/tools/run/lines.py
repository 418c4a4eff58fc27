"""A rank's output, cut into lines. Nothing here touches a file or looks at a clock."""

import codecs

# A line that is longer comes in pieces.
LONGEST_LINE = 2**16


class Lines:
    """One stream's text so far: whole lines are handed out, the unfinished one is kept."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._kept = ""
        self.is_redrawn = False

    def feed(self, data: bytes, *, final: bool = False) -> list[str]:
        """The lines that ``data`` finishes, without what was drawn over and without their ends."""
        *lines, rest = (self._kept + self._decoder.decode(data, final)).split("\n")
        self.is_redrawn = "\r" in rest or (self.is_redrawn and not lines)
        shown = [_visible(line) for line in lines]
        if len(rest) > LONGEST_LINE or (final and _visible(rest)):
            shown.append(_visible(rest))
            rest = ""
        # The end of a line may still follow a trailing return, which then does not mean drawing over.
        self._kept = _visible(rest) + ("\r" if rest.endswith("\r") else "")
        return shown

    @property
    def unfinished(self) -> str:
        """What can be seen of a line that has no end yet."""
        return _visible(self._kept)


def _visible(line: str) -> str:
    """What is left of a line over which a carriage return lets the next text be drawn."""
    return line.rstrip("\r").rpartition("\r")[2]
