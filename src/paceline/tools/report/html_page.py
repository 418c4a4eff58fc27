"""Makes the page: one HTML file with everything in it, which a browser opens from the disk."""

import html
import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib import resources
from typing import Any

from paceline.recording.rows import BucketColumn, StepColumn
from paceline.tools.report.analysis import RunAnalysis
from paceline.tools.report.figure_steps import wall_times_of_all
from paceline.tools.report.last_minute import LastMinute
from paceline.tools.report.page_numbers import (
    COLUMNS,
    encode,
    overlay_columns,
    step_columns,
    sum_columns,
    tick,
)
from paceline.tools.report.run_history import RunHistory
from paceline.tools.report.step_parts import StepPart
from paceline.tools.report.terms import TERMS
from paceline.tools.report.wall_time import PauseCause
from paceline.tools.report.wrapper_runs import RankTimeline, WrapperRun

# In all timelines together. A browser would take long to open a page with more.
_MOST_NUMBERS = 3_500_000
_MOST_RANKS = 64
_SCRIPTS = ("data.js", "formatting.js", "terms.js", "timeline.js", "plots.js", "tables.js", "page.js")


def html_page(
    analysed: Sequence[tuple[WrapperRun, RunAnalysis]], last_minute: LastMinute | None = None
) -> str:
    """The page of some runs and their analyses, and of how the run ended if it stalled or failed."""
    share = _MOST_NUMBERS // max(1, len(analysed))
    wrappers, columns = [], []
    for run, analysis in analysed:
        drawn = _drawn(run, analysis)
        last = max(1, share // (len(drawn) * (COLUMNS + len(BucketColumn) * len(run.buckets))))
        unit, start = tick(drawn), min(_first_begin(timeline, last) for timeline in drawn)
        walls = wall_times_of_all(run, analysis.figures_from_step)
        by_rank = dict(zip((each.rank for each in run.timelines), walls, strict=True))
        overlays = [overlay_columns(each, by_rank[each.rank], last, unit=unit) for each in drawn]
        wrappers.append(_wrapper_data(run, analysis, drawn, last, start) | {"tick_ms": unit / 1e6})
        for timeline, about, own in zip(drawn, wrappers[-1]["timelines"], overlays, strict=True):
            about["overlays"] = len(own[-1])
            columns += [*step_columns(timeline, last, start=start, unit=unit), *sum_columns(timeline), *own]
    data = {
        "parts": [str(part) for part in StepPart],
        "causes": [str(cause) for cause in PauseCause],
        "terms": TERMS,
        "wrappers": wrappers,
    }
    return fill_template(
        _file("template.html"),
        {
            "title": html.escape(
                f"{wrappers[0]['module']}: paceline report".encode("ascii", "replace").decode()
            ),
            "style": _file("page.css"),
            "last_minute": "" if last_minute is None else _last_minute_section(last_minute),
            "report": _json(data),
            "numbers": encode(columns),
            "script": "\n".join(map(_file, _SCRIPTS)),
        },
    )


def _last_minute_section(last: LastMinute) -> str:
    ranks = "".join(
        f"<h3>rank {rank.rank}</h3><pre>{html.escape(chr(10).join([*rank.lines, '', *rank.stack]))}</pre>"
        for rank in last.ranks
    )
    title = '<h2 id="last-minute-title" data-term="last minute">The last minute</h2>'
    first = f"<p>{html.escape(last.first)}</p>"
    return f'<section aria-labelledby="last-minute-title">{title}{first}{ranks}</section>'


def _drawn(run: WrapperRun, analysis: RunAnalysis) -> list[RankTimeline]:
    """The ranks that are drawn: if there are too many, the stragglers and the first of the others."""
    stragglers = {each.rank for each in analysis.stragglers}
    first = sorted(run.timelines, key=lambda each: (each.rank not in stragglers, each.rank))[:_MOST_RANKS]
    return sorted(first, key=lambda each: each.rank)


def _first_begin(timeline: RankTimeline, last: int) -> int:
    return timeline[StepColumn.BEGIN][max(0, len(timeline) - last)]


def _wrapper_data(
    run: WrapperRun, analysis: RunAnalysis, drawn: Sequence[RankTimeline], last: int, start: int
) -> dict[str, Any]:
    return {
        **asdict(analysis),
        "timelines": [_timeline_data(each, last) for each in drawn],
        "parameter_names": [str(name) for name in run.description["slots"]],
        "history": _history_data(analysis.history, start=start + int(run.description["epoch"])),
    }


def _timeline_data(timeline: RankTimeline, last: int) -> dict[str, Any]:
    first = max(0, len(timeline) - last)
    return {
        "rank": timeline.rank,
        "rows": len(timeline) - first,
        "sums": len(timeline.sums),
        "last_rows": [row - first for row in timeline.last_rows if row >= first],
    }


def _history_data(history: RunHistory, *, start: int) -> dict[str, Any]:
    """The history, with each healing's place in the timeline; ``start`` is when that begins."""
    return {
        "healed": history.healed,
        "samples": history.samples,
        "is_right": history.ledger is None or history.ledger.is_right,
        "healings": [
            {"words": words, "from_ms": (each.at - start) / 1e6, "ms": each.seconds * 1e3}
            for words, each in zip(history.healing_words, history.healings, strict=True)
        ],
    }


def fill_template(template: str, values: dict[str, str]) -> str:
    """Replace each {{name}} by its value; a value that contains such a name itself is left as it is."""
    first, *rest = template.split("{{")
    filled = [first]
    for piece in rest:
        name, after = piece.split("}}", 1)
        filled += [values[name], after]
    return "".join(filled)


def _file(name: str) -> str:
    return resources.files("paceline.tools.report").joinpath("page", name).read_text("utf-8")


def _json(data: Any) -> str:
    """JSON for inside a script element, which no text in it can end."""
    plain = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return plain.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
