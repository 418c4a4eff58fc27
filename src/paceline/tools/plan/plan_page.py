"""Makes the page of a plan: one HTML file with everything in it, and curves without scripts (no torch)."""

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources

from paceline.tools.formatting import byte_size, milliseconds, percent, plain_number, plural
from paceline.tools.plan.cluster import Cluster
from paceline.tools.plan.prediction import OUTER_PERIOD, HookToTake, Prediction
from paceline.tools.plan.recorded_steps import RecordedSteps
from paceline.tools.report.html_page import fill_template

COLUMNS = ("hosts", "hook", "step", "stragglers", "exposed", "work", "sent", "efficiency")
_WIDTH, _HEIGHT = 400, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 12, 34
_CHARACTER, _GAP = 6.5, 5.0  # of a label: the width of a character, and the least distance to the next
_TWO_DECADES = 150.0  # and a half: beyond, a chart has room for powers of ten only


@dataclass(frozen=True)
class _Axis:
    """Maps values to a chart's height.

    Attributes:
        low: the value at the bottom.
        high: the value at the top.
        is_log: whether equal ratios have equal heights.
    """

    low: float
    high: float
    is_log: bool

    def y(self, value: float) -> float:
        low, high, value = (
            math.log10(each) if self.is_log else each for each in (self.low, self.high, value)
        )
        return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    def ticks(self) -> list[float]:
        if not self.is_log:
            return [self.low + (self.high - self.low) * part / 4 for part in range(5)]
        ends = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        steps = (1, 2, 5) if self.high / self.low <= _TWO_DECADES else (1,)
        values = [step * 10.0**power for power in range(ends[0], ends[1] + 1) for step in steps]
        return [value for value in values if self.low <= value <= self.high]


def row_texts(each: Prediction) -> list[str]:
    """What a prediction has in each of the ``COLUMNS``."""
    times = (each.step_ms, each.straggler_ms, each.exposed_ms, each.hook_ms)
    shown = [milliseconds(time) if time else "0" for time in times]
    return [f"{each.hosts:,}", each.hook, *shown, byte_size(each.sent_bytes), percent(each.efficiency)]


def describe_choice(choice: HookToTake) -> str:
    """A choice in one line."""
    return f"{plural(choice.hosts, 'host')}: take {choice.hook}; {choice.why}"


def plan_page(
    recorded: RecordedSteps,
    cluster: Cluster,
    predictions: Sequence[Prediction],
    choices: Sequence[HookToTake],
) -> str:
    """The page of a plan."""
    hooks = list(dict.fromkeys(each.hook for each in predictions))
    return fill_template(
        _file("plan.html"),
        {
            "title": html.escape(f"{recorded.module}: paceline plan"),
            "style": _file("plan.css"),
            "summary": html.escape(_summary(recorded, predictions, choices)),
            "scope": html.escape(_scope(recorded, cluster)),
            "legend": "".join(map(_legend_entry, hooks)),
            "charts": _charts(predictions),
            "choices": "".join(f"<li>{html.escape(describe_choice(each))}</li>" for each in choices),
            "table": _table(predictions, choices),
            "notes": _notes(cluster),
        },
    )


def _summary(
    recorded: RecordedSteps, predictions: Sequence[Prediction], choices: Sequence[HookToTake]
) -> str:
    last = choices[-1]
    [taken] = [each for each in predictions if (each.hosts, each.hook) == (last.hosts, last.hook)]
    hook = "no hook" if last.hook == "none" else f"the hook {last.hook}"
    return (
        f"With {hook}, a step of {recorded.module} on {plural(last.hosts, 'host')} takes about "
        f"{milliseconds(taken.step_ms)}, at {percent(taken.efficiency)} efficiency."
    )


def _scope(recorded: RecordedSteps, cluster: Cluster) -> str:
    return (
        f"Predicted from {plural(len(recorded.steps), 'step')} that {plural(recorded.ranks, 'rank')} "
        f"recorded ({milliseconds(recorded.step_seconds * 1e3)} each, {byte_size(recorded.nbytes)} of "
        f"gradients), for {plural(cluster.ranks_per_host, 'rank')} per host, a link of {_rate(cluster.link)} "
        f"and a latency of {milliseconds(cluster.latency * 1e3)}."
        + "".join(f" Note: {note}." for note in recorded.notes)
    )


def _notes(cluster: Cluster) -> str:
    cores = cluster.cores_per_host or cluster.ranks_per_host
    return (
        "Stragglers: how much later than a rank's own work the slowest rank is done. Exposed: communication "
        "and work for it that no computation hides. Work: what a rank's thread sums, compresses and spreads, "
        f"with {plural(cores, 'core')} per host. Sent: by each host, per step. Efficiency: the share of a "
        f"step that is a rank's own work. outer sends once in {OUTER_PERIOD} steps; the table has the mean "
        "per step."
    )


def _rate(bits: float) -> str:
    for unit, factor in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits >= factor:
            return f"{plain_number(bits / factor)} {unit}"
    return f"{plain_number(bits)} bit/s"


def _legend_entry(hook: str) -> str:
    line = f'<line class="curve {hook}" x1="0" y1="6" x2="26" y2="6"/>'
    return f'<li><svg viewBox="0 0 26 12" aria-hidden="true">{line}</svg>{hook}</li>'


def _charts(predictions: Sequence[Prediction]) -> str:
    steps = [each.step_ms for each in predictions]
    sent = [each.sent_bytes for each in predictions if each.sent_bytes]
    charts = [
        _chart("Step time", predictions, lambda each: each.step_ms, milliseconds, _log_axis(steps)),
        _chart(
            "Efficiency",
            predictions,
            lambda each: each.efficiency,
            percent,
            _Axis(0, 1, is_log=False),
        ),
    ]
    if sent:
        charts.append(
            _chart(
                "Sent per host and step",
                predictions,
                lambda each: each.sent_bytes,
                _decimal_bytes,
                _log_axis(sent),
            )
        )
    return "".join(charts)


def _log_axis(values: Sequence[float]) -> _Axis:
    return _Axis(min(values) / 1.5, max(values) * 1.5, is_log=True)


def _decimal_bytes(value: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= factor:
            return f"{plain_number(value / factor)} {unit}"
    return f"{plain_number(value)} B"


def _chart(
    title: str,
    predictions: Sequence[Prediction],
    value: Callable[[Prediction], float],
    text: Callable[[float], str],
    axis: _Axis,
) -> str:
    hosts = sorted({each.hosts for each in predictions})
    drawn = [_grid_line(axis.y(tick), text(tick)) for tick in axis.ticks()]
    drawn += _host_labels(hosts)
    for hook in dict.fromkeys(each.hook for each in predictions):
        own = [each for each in predictions if each.hook == hook and value(each) > 0]
        places = [(_x(each.hosts, hosts), axis.y(value(each))) for each in own]
        drawn.append(_curve(hook, places))
        drawn += [
            _point(hook, place, f"{hook}, {plural(each.hosts, 'host')}: {text(value(each))}")
            for each, place in zip(own, places, strict=True)
        ]
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    drawn.append(f'<text x="{middle:.0f}" y="{_HEIGHT - 2}" text-anchor="middle">hosts</text>')
    head = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title}, by hosts">'
    return f"<figure><figcaption>{title}</figcaption>{head}{''.join(drawn)}</svg></figure>"


def _x(number: int, hosts: Sequence[int]) -> float:
    """Equal ratios of hosts have equal widths; a single number of hosts is in the middle."""
    if len(hosts) == 1:
        return (_LEFT + _WIDTH - _RIGHT) / 2
    share = math.log(number / hosts[0]) / math.log(hosts[-1] / hosts[0])
    return _LEFT + 14 + share * (_WIDTH - _LEFT - _RIGHT - 28)


def _grid_line(y: float, text: str) -> str:
    line = f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}"/>'
    return f'{line}<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'


def _host_labels(hosts: Sequence[int]) -> list[str]:
    """The numbers of hosts below a chart, without those for which there is no room."""
    labels, free = [], 0.0
    for number in hosts:
        x, text = _x(number, hosts), f"{number:,}"
        half = _CHARACTER * len(text) / 2
        if x - half >= free:
            labels.append(
                f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{text}</text>'
            )
            free = x + half + _GAP
    return labels


def _curve(hook: str, places: Sequence[tuple[float, float]]) -> str:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return f'<polyline class="curve {hook}" points="{points}"/>'


def _point(hook: str, place: tuple[float, float], text: str) -> str:
    x, y = place
    circle = f'<circle class="{hook} point" cx="{x:.1f}" cy="{y:.1f}" r="3.5">'
    return f"{circle}<title>{html.escape(text)}</title></circle>"


def _table(predictions: Sequence[Prediction], choices: Sequence[HookToTake]) -> str:
    taken = {(choice.hosts, choice.hook) for choice in choices}
    rows, before = [f"<tr>{''.join(f'<th>{each}</th>' for each in COLUMNS)}</tr>"], 0
    for each in predictions:
        names = [
            *(["taken"] if (each.hosts, each.hook) in taken else []),
            *(["first"] if each.hosts != before else []),
        ]
        before = each.hosts
        cells = "".join(f"<td>{html.escape(text)}</td>" for text in row_texts(each))
        rows.append(f'<tr class="{" ".join(names)}">{cells}</tr>')
    return "".join(rows)


def _file(name: str) -> str:
    return resources.files("paceline.tools.plan").joinpath("page", name).read_text("utf-8")
