"""Writes the last steps as a trace for Perfetto and Chrome: one process per rank, all on one clock."""

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.recording.files import write_file
from paceline.recording.rows import BucketColumn, StepColumn
from paceline.tools.report.step_parts import StepPart
from paceline.tools.report.wrapper_runs import RankTimeline, WrapperRun

# The viewers take long to open more.
_MOST_EVENTS = 200_000
_COMPUTE, _OPTIMIZER, _COMMUNICATION = 1, 2, 3
# At most this many threads per wrapper. Buckets that are in flight at the same time have a thread each.
_THREADS = 64

Event = dict[str, Any]

# Of several times at which a part may begin, the latest counts.
_PARTS = (
    (StepPart.ACCUMULATION, _COMPUTE, [StepColumn.BEGIN], StepColumn.FORWARD_START),
    (StepPart.JOIN, _COMPUTE, [StepColumn.FORWARD_START], StepColumn.JOIN_END),
    (StepPart.BUFFERS, _COMPUTE, [StepColumn.FORWARD_START, StepColumn.JOIN_END], StepColumn.BUFFERS_END),
    (
        StepPart.FORWARD,
        _COMPUTE,
        [StepColumn.FORWARD_START, StepColumn.JOIN_END, StepColumn.BUFFERS_END],
        StepColumn.FORWARD_END,
    ),
    (StepPart.BACKWARD, _COMPUTE, [StepColumn.BACKWARD_START], StepColumn.BACKWARD_END),
    ("waiting for buckets", _COMPUTE, [StepColumn.BACKWARD_END], StepColumn.ALL_REDUCED),
    (StepPart.GRAD_ASSIGNMENT, _COMPUTE, [StepColumn.ALL_REDUCED], StepColumn.END),
    (StepPart.OPTIMIZER, _OPTIMIZER, [StepColumn.OPTIMIZER_START], StepColumn.OPTIMIZER_END),
)


def write_trace(runs: Sequence[WrapperRun], path: Path) -> int:
    """Write the trace, compressed if the path ends in ``.gz``; returns how many of the last steps it has."""
    events_per_step = sum(len(run.timelines) * (len(_PARTS) + 3 * len(run.buckets)) for run in runs)
    last = max(1, _MOST_EVENTS // max(1, events_per_step))
    start = min(_wall_time(run, begin) for run in runs for begin in _first_begins(run, last))
    events = [
        event
        for number, run in enumerate(runs)
        for event in _run_events(
            run, last, start=start, first_thread=number * _THREADS, several=len(runs) > 1
        )
    ]
    content = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))
    data = content.encode("ascii")
    write_file(path, gzip.compress(data) if path.suffix == ".gz" else data)
    return min(last, max(len(timeline) for run in runs for timeline in run.timelines))


def _first_begins(run: WrapperRun, last: int) -> Iterable[int]:
    return (timeline[StepColumn.BEGIN][max(0, len(timeline) - last)] for timeline in run.timelines)


def _wall_time(run: WrapperRun, time: int) -> int:
    """Wrappers may be aligned to the clocks of different hosts; the wall clock is what they share."""
    return time + int(run.description["epoch"])


def _run_events(
    run: WrapperRun, last: int, *, start: int, first_thread: int, several: bool
) -> Iterator[Event]:
    suffix = f" ({run.module})" if several else ""
    for timeline in run.timelines:
        pid = timeline.rank
        yield _meta("process_name", pid, 0, f"rank {pid} on {timeline.host}")
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
        shift = start - int(run.description["epoch"])
        used = set()
        for event in _timeline_events(run, timeline, last, shift):
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


def _timeline_events(run: WrapperRun, timeline: RankTimeline, last: int, start: int) -> Iterator[Event]:
    for row in range(max(0, len(timeline) - last), len(timeline)):
        common = {"pid": timeline.rank, "args": {"step": timeline[StepColumn.STEP][row]}}
        for name, thread, begins, end in _PARTS:
            begin = max(timeline[each][row] for each in begins)
            yield from _slice(name, thread, begin, timeline[end][row], start, common)
        yield from _bucket_events(run, timeline, row, start)


def _slice(name: str, thread: int, begin: int, end: int, start: int, common: Event) -> Iterator[Event]:
    if begin and end > begin:
        times = {"ts": (begin - start) / 1e3, "dur": (end - begin) / 1e3}
        yield {"ph": "X", "name": name, "tid": thread, **times, **common}


def _bucket_events(run: WrapperRun, timeline: RankTimeline, row: int, start: int) -> Iterator[Event]:
    """Each bucket from launch to reduced, with an arrow from where its last gradient was ready."""
    thread_ends: list[int] = []
    step = timeline[StepColumn.STEP][row]
    for bucket, plan in enumerate(run.buckets):
        ready, slot, launch, reduced = (timeline.bucket(bucket, column)[row] for column in BucketColumn)
        if not launch or reduced <= launch:
            continue
        free = next((number for number, end in enumerate(thread_ends) if end <= launch), len(thread_ends))
        thread_ends[free : free + 1] = [reduced]
        thread = min(_COMMUNICATION + free, _THREADS - 1)
        args = {"step": step, "bytes": plan["nbytes"], "last gradient": run.parameter_name(slot)}
        args["queued (ms)"] = round(max(0, launch - ready) / 1e6, 3) if ready else 0
        common = {"pid": timeline.rank, "args": args}
        yield from _slice(f"bucket {bucket}", thread, launch, reduced, start, common)
        if ready:
            arrow = {
                "name": "ready",
                "cat": "bucket",
                "id": f"{timeline.rank}.{row}.{bucket}",  # a step may be there twice
                "pid": timeline.rank,
            }
            yield {"ph": "s", "tid": _COMPUTE, "ts": (ready - start) / 1e3, **arrow}
            yield {"ph": "f", "bp": "e", "tid": thread, "ts": (launch - start) / 1e3, **arrow}
