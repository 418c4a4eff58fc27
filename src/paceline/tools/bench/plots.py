"""Plots of what was measured, by matplotlib: steps as bars, collectives as lines over their size."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import MissingPackageError, OptionError
from paceline.tools.bench.collective_times import (
    COLLECTIVE_SIDES,
    COLLECTIVES,
    CollectiveCase,
    SecondsBySide,
    format_size,
)
from paceline.tools.bench.measure import Timing, format_seconds, time_unit, timing
from paceline.tools.bench.sides import ALONE, OPTIMIZER_SIDES, Side
from paceline.tools.bench.step_times import StepResult
from paceline.tools.formatting import plain_number, plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

# The same colour for torch on gloo, torch on our backend, paceline, and neither of them.
COLOURS = ("#b04a12", "#1f66b5", "#12805c", "#6d6d6d")
MARKERS = ("o", "s", "D", "x")
STEP_COLOURS = dict.fromkeys(OPTIMIZER_SIDES, COLOURS[2]) | dict(
    zip(map(str, (Side("torch"), Side("torch", "backend"), Side("paceline"), ALONE)), COLOURS, strict=True)
)
# Inches: a panel of bars and a panel of lines, and what is above and below all panels.
BARS_WIDTH, BARS_HEIGHT = 5.0, 1.9
LINES_WIDTH, LINES_HEIGHT = 4.4, 3.6
MARGIN = 0.8


def check_plot_file(path: Path) -> None:
    """Make sure that a plot can be written, before minutes are spent on measuring.

    Raises:
        MissingPackageError: matplotlib is not installed.
        OptionError: matplotlib cannot write files with this suffix.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise MissingPackageError(
            f"plots need a package that is not installed (missing: {error.name}); "
            "install it with `pip install 'paceline[plot]'`"
        ) from error
    suffixes = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lstrip(".") not in suffixes:
        raise OptionError(f"plots have one of the suffixes {', '.join(sorted(suffixes))} (file: {path})")


def save_plot(
    path: Path,
    *,
    title: str,
    note: str,
    steps: Sequence[StepResult] = (),
    collectives: Mapping[CollectiveCase, SecondsBySide] | None = None,
    columns: int = 2,
) -> None:
    """Write a plot of steps, or of collectives, or both below each other; ``columns`` panels per row."""
    import matplotlib
    from matplotlib.figure import Figure

    panels = _panels(collectives or {})
    bars, lines = _grid(len(steps), columns), _grid(len(panels), columns)
    heights = [height for height in (bars[0] * BARS_HEIGHT, lines[0] * LINES_HEIGHT) if height]
    width = max(bars[1] * BARS_WIDTH, lines[1] * LINES_WIDTH)
    # Text stays text in an SVG, so that it can be searched.
    with matplotlib.rc_context({"svg.fonttype": "none", "font.size": 9}):
        figure = Figure((width, sum(heights) + MARGIN), layout="constrained")
        figure.suptitle(title, fontsize=12, fontweight="bold")
        figure.supxlabel(note, fontsize=8)
        parts = iter(figure.subfigures(len(heights), height_ratios=heights, squeeze=False).flat)
        if steps:
            _draw_steps(next(parts), steps, bars)
        if panels:
            _draw_collectives(next(parts), panels, lines)
        figure.savefig(path)


def _grid(panels: int, columns: int) -> tuple[int, int]:
    """The rows and columns for a number of panels."""
    return math.ceil(panels / columns), min(panels, columns)


def _panels(collectives: Mapping[CollectiveCase, SecondsBySide]) -> dict[str, dict[str, dict[int, Timing]]]:
    """By collective and number of ranks, and by side: the time of each size."""
    panels: dict[str, dict[str, dict[int, Timing]]] = {}
    order = list(COLLECTIVES)
    for case in sorted(collectives, key=lambda case: (order.index(case.collective), case.world, case.size)):
        panel = panels.setdefault(f"{case.collective}, {plural(case.world, 'rank')}", {})
        for side, values in collectives[case].items():
            panel.setdefault(side, {})[case.size] = timing(values)
    return panels


def _draw_steps(figure: "FigureBase", steps: Sequence[StepResult], shape: tuple[int, int]) -> None:
    axes = list(figure.subplots(*shape, squeeze=False).flat)
    for axis, result in zip(axes, steps, strict=False):
        _draw_bars(axis, {side: timing(values) for side, values in result.times.of.items()})
        axis.set_title(f"step of {result.what}", fontsize=10)
    for unused in axes[len(steps) :]:
        unused.set_visible(False)


def _draw_bars(axis: "Axes", timings: Mapping[str, Timing]) -> None:
    """One bar per side, from zero to the median, with the quartiles as error bars."""
    medians = [1e3 * each.median for each in timings.values()]
    quartiles = [
        [1e3 * (each.median - each.low) for each in timings.values()],
        [1e3 * (each.high - each.median) for each in timings.values()],
    ]
    colours = [STEP_COLOURS[side] for side in timings]
    axis.barh(list(timings), medians, xerr=quartiles, color=colours, capsize=3, height=0.7)
    longest = max(1e3 * each.high for each in timings.values())
    for place, each in enumerate(timings.values()):
        axis.text(1.03 * longest, place, format_seconds(each.median), va="center", clip_on=False)
    axis.set_xlim(0, 1.22 * longest)
    axis.invert_yaxis()
    axis.set_xlabel("ms per step: median, quartiles")
    axis.spines[["top", "right"]].set_visible(False)


def _draw_collectives(
    figure: "FigureBase", panels: Mapping[str, Mapping[str, Mapping[int, Timing]]], shape: tuple[int, int]
) -> None:
    axes = list(figure.subplots(*shape, squeeze=False, sharey=True).flat)
    for axis, (title, panel) in zip(axes, panels.items(), strict=False):
        _draw_lines(axis, panel)
        axis.set_title(title, fontsize=10)
    for axis in axes[:: shape[1]]:
        axis.set_ylabel("time per call: median, quartiles")
    for unused in axes[len(panels) :]:
        unused.set_visible(False)
    drawn = {
        label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    names = [side for side in COLLECTIVE_SIDES if side in drawn]
    handles = [drawn[name] for name in names]
    figure.legend(handles, names, loc="outside upper center", ncols=len(names), frameon=False)


def _draw_lines(axis: "Axes", panel: Mapping[str, Mapping[int, Timing]]) -> None:
    """One line per side over the size, both axes logarithmic, with the quartiles as error bars."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    for side, by_size in panel.items():
        style = COLLECTIVE_SIDES.index(side)
        medians = [each.median for each in by_size.values()]
        quartiles = [
            [each.median - each.low for each in by_size.values()],
            [each.high - each.median for each in by_size.values()],
        ]
        axis.errorbar(
            list(by_size),
            medians,
            yerr=quartiles,
            label=side,
            color=COLOURS[style],
            marker=MARKERS[style],
            markersize=4,
            capsize=3,
        )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    sizes = sorted({size for by_size in panel.values() for size in by_size})
    axis.set_xticks(sizes, [format_size(size) for size in sizes], rotation=30)
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: _tick(seconds)))
    axis.set_xlabel("size of a rank's tensor")
    axis.grid(which="major", linewidth=0.5, alpha=0.5)


def _tick(seconds: float) -> str:
    unit, factor = time_unit(seconds)
    return f"{plain_number(seconds * factor)} {unit}"
