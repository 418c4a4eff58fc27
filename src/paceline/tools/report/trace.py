"""The last steps as a trace that Perfetto and Chrome open: a process a rank, on one clock."""

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.recording.rows import BucketColumn, Column
from paceline.tools.report.runs import Section, Track

# More take these viewers long to open.
_MOST_EVENTS = 200_000
_COMPUTE, _OPTIMIZER, _COMMUNICATION = 1, 2, 3
# Threads of one wrapper; buckets that are under way at once have a thread each.
_THREADS = 64

Event = dict[str, Any]

_PARTS = (
    ("earlier passes", Column.BEGIN, Column.FORWARD_START),
    ("module buffers", Column.FORWARD_START, Column.BUFFERS_END),
    ("forward", Column.FORWARD_START, Column.FORWARD_END),
    ("backward", Column.BACKWARD_START, Column.BACKWARD_END),
    ("waiting for buckets", Column.BACKWARD_END, Column.LANDED),
    ("handing out", Column.LANDED, Column.END),
)


def write_trace(sections: Sequence[Section], path: Path) -> int:
    """Write the trace, compressed if the name says so; how many of the last steps there was room for."""
    tracks = sum(len(section.tracks) * (len(_PARTS) + 1 + 3 * len(section.buckets)) for section in sections)
    last = max(1, _MOST_EVENTS // max(1, tracks))
    start = min(_wall(section, begin) for section in sections for begin in _begins(section, last))
    events = [
        event
        for number, section in enumerate(sections)
        for event in _section(
            section, last, start=start, first_thread=number * _THREADS, several=len(sections) > 1
        )
    ]
    content = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))
    data = content.encode("ascii")
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return min(last, max(len(track) for section in sections for track in section.tracks))


def _begins(section: Section, last: int) -> Iterable[int]:
    return (track[Column.BEGIN][max(0, len(track) - last)] for track in section.tracks)


def _wall(section: Section, time: int) -> int:
    """Sections may have different hosts' clocks; their wall clocks are what they share."""
    return time + int(section.about["epoch"])


def _section(section: Section, last: int, *, start: int, first_thread: int, several: bool) -> Iterator[Event]:
    suffix = f" ({section.module})" if several else ""
    for track in section.tracks:
        pid = track.rank
        yield _meta("process_name", pid, 0, f"rank {pid} on {track.about['host']}")
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
        shift = start - int(section.about["epoch"])
        used = set()
        for event in _track(section, track, last, shift):
            event["tid"] += first_thread
            used.add(event["tid"])
            yield event
        for thread in sorted(used):
            yield _meta("thread_name", pid, thread, _thread_name(thread - first_thread) + suffix)


def _thread_name(thread: int) -> str:
    if thread < _COMMUNICATION:
        return {_COMPUTE: "compute", _OPTIMIZER: "optimizer"}[thread]
    return f"communication{f' {thread - _COMMUNICATION + 1}' if thread > _COMMUNICATION else ''}"


def _meta(kind: str, pid: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": thread, "args": {"name": name}}


def _track(section: Section, track: Track, last: int, start: int) -> Iterator[Event]:
    for place in range(max(0, len(track) - last), len(track)):
        common = {"pid": track.rank, "args": {"step": track[Column.STEP][place]}}
        for name, begin, end in _PARTS:
            yield from _slice(name, _COMPUTE, track[begin][place], track[end][place], start, common)
        yield from _slice(
            "optimizer",
            _OPTIMIZER,
            track[Column.OPTIMIZER_START][place],
            track[Column.OPTIMIZER_END][place],
            start,
            common,
        )
        yield from _buckets(section, track, place, start)


def _slice(name: str, thread: int, begin: int, end: int, start: int, common: Event) -> Iterator[Event]:
    if begin and end > begin:
        times = {"ts": (begin - start) / 1e3, "dur": (end - begin) / 1e3}
        yield {"ph": "X", "name": name, "tid": thread, **times, **common}


def _buckets(section: Section, track: Track, place: int, start: int) -> Iterator[Event]:
    """Each from its launch to its return, with an arrow from where its last gradient was there."""
    free: list[int] = []
    step = track[Column.STEP][place]
    for bucket, plan in enumerate(section.buckets):
        ready, slot, launch, done = (track.bucket(bucket, column)[place] for column in BucketColumn)
        if not launch or done <= launch:
            continue
        thread = next((number for number, end in enumerate(free) if end <= launch), len(free))
        free[thread : thread + 1] = [done]
        thread = min(_COMMUNICATION + thread, _THREADS - 1)
        args = {"step": step, "bytes": plan["nbytes"], "last gradient": section.name_of(slot)}
        args["held back (ms)"] = round(max(0, launch - ready) / 1e6, 3) if ready else 0
        yield from _slice(f"bucket {bucket}", thread, launch, done, start, {"pid": track.rank, "args": args})
        if ready:
            arrow = {
                "name": "ready",
                "cat": "bucket",
                "id": f"{track.rank}.{step}.{bucket}",
                "pid": track.rank,
            }
            yield {"ph": "s", "tid": _COMPUTE, "ts": (ready - start) / 1e3, **arrow}
            yield {"ph": "f", "bp": "e", "tid": thread, "ts": (launch - start) / 1e3, **arrow}
