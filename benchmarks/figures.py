"""Generates the tables of figures in README.md and docs/ from docs/figures.json, which the benchmarks write.

python benchmarks/figures.py --write    # put the tables into the pages
python benchmarks/figures.py --check    # exit with 1 if a page is not up to date

A benchmark with `--figures docs/figures.json` replaces its own entry in that file. A page has a table between
the lines `<!-- figures: NAME begin -->` and `<!-- figures: NAME end -->`.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import auto_hook_tables
import fault_tables
import heal_tables
import outer_tables
import plan_tables
import scale_tables

from paceline.tools.bench.collective_times import format_size
from paceline.tools.bench.measure import Size, Timing

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs" / "figures.json"
BLOCK = re.compile(
    r"(?P<begin><!-- figures: (?P<name>\S+) begin -->)\n.*?(?P<end><!-- figures: (?P=name) end -->)",
    re.DOTALL,
)
KINDS = {"s": Timing, "bytes": Size}

Entry = Mapping[str, Any]
Lines = Iterator[str]


def load(path: Path) -> dict[str, Any]:
    """The entries of all benchmarks, by name."""
    figures: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return figures


def merge(path: Path, name: str, entry: Entry) -> None:
    """Replace one benchmark's entry in the file, and keep the others."""
    figures = load(path) | {name: entry}
    path.write_text(json.dumps(dict(sorted(figures.items())), indent=1, ensure_ascii=False) + "\n")


def pages() -> list[Path]:
    """The pages that may have tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def rendered(text: str, figures: Mapping[str, Entry]) -> str:
    """A page's text with its tables as they should be; a table without figures, or without a row, stays."""

    def replace(block: re.Match[str]) -> str:
        benchmark, render = TABLES[block["name"]]
        lines = [*render(figures[benchmark])] if benchmark in figures else []
        if sum(line.startswith("| ") for line in lines) < 2:  # a header alone
            return block[0]
        return "\n".join([block["begin"], *lines, block["end"]])

    return BLOCK.sub(replace, text)


def stale(texts: Mapping[str, str], figures: Mapping[str, Entry]) -> list[str]:
    """The names of pages that are not up to date."""
    return [name for name, text in texts.items() if rendered(text, figures) != text]


def without_figures(texts: Iterable[str], figures: Mapping[str, Entry]) -> list[str]:
    """The benchmarks that pages need and that have no entry yet."""
    needed = {TABLES[block["name"]][0] for text in texts for block in BLOCK.finditer(text)}
    return sorted(needed - set(figures))


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Lines:
    """A table in Markdown."""
    yield f"| {' | '.join(header)} |"
    yield "|" + "---|" * len(header)
    for row in rows:
        yield f"| {' | '.join(row)} |"


def with_source(lines: Lines, entry: Entry) -> Lines:
    """A table, and below it how it was measured."""
    yield from lines
    versions = f"Python {entry['python']}, torch {entry['torch']}"
    yield ""
    yield f"`{entry['command']}` on {entry['machine']}; {versions}; medians (quartiles)."


def spread(result: Entry, side: str) -> str:
    """A side's median with its quartiles; nothing if it was not measured."""
    if side not in result["spreads"]:
        return ""
    values = dict(result["spreads"][side])
    return str(KINDS[values.pop("unit")](**values))


def figure(result: Entry, name: str) -> str:
    """A figure with its quartiles; nothing if it was not measured."""
    found = result["figures"].get(name)
    if found is None or found["value"] is None:
        return ""
    digits = 0 if found["value"] >= 10 else 1 if found["value"] >= 2 else 2
    value, *quartiles = (f"{each:.{digits}f}" for each in (found["value"], *(found["quartiles"] or ())))
    return f"{value} ({' to '.join(quartiles)})" if quartiles else value


def target(result: Entry, name: str) -> str:
    """A figure's target, and whether it was missed; nothing if it has none."""
    found = result["figures"].get(name)
    if found is None or found["target"] is None:
        return ""
    value, inverse = found["target"], 1 / found["target"]
    number = f"1/{inverse:.0f}" if inverse >= 2 and abs(inverse - round(inverse)) < 1e-9 else f"{value:g}"
    return f"{'at most' if found['at_most'] else 'at least'} {number}{'' if found['met'] else ': **missed**'}"


def cases(entry: Entry, **wanted: str | int) -> Iterator[Entry]:
    """The results whose case has these values."""
    for result in entry["results"]:
        if all(result["case"].get(name) == value for name, value in wanted.items()):
            yield result


def every_result(entry: Entry) -> Lines:
    """All results of a benchmark, one row per figure."""
    header = ("what", "median (quartiles)", "figure", "target")
    rows = []
    for result in entry["results"]:
        sides = "; ".join(f"{side}: {spread(result, side)}" for side in result["spreads"])
        for number, name in enumerate(result["figures"]):
            first = ("", "") if number else (result["what"], sides)
            rows.append((*first, f"{name}: {figure(result, name)}", target(result, name)))
    return with_source(table(header, rows), entry)


def collectives(entry: Entry) -> Lines:
    """All-reduces of all sizes and numbers of ranks."""
    header = (
        "ranks", "size", "gloo", "shared memory", "gloo / shared", "target", "shared / memcpy", "target",
        "backend", "gloo / backend",
    )  # fmt: skip
    rows = (
        (
            str(result["case"]["world"]),
            format_size(result["case"]["size"]),
            spread(result, "gloo"),
            spread(result, "shared"),
            figure(result, "gloo / shared"),
            target(result, "gloo / shared"),
            figure(result, "shared / memcpy"),
            target(result, "shared / memcpy"),
            spread(result, "backend"),
            figure(result, "gloo / backend"),
        )
        for result in cases(entry, collective="all_reduce")
    )
    return with_source(table(header, rows), entry)


def collectives_mpi(quantity: str) -> Callable[[Entry], Lines]:
    """All-reduces of paceline, gloo and MPI libraries: wall or CPU times."""
    return lambda entry: _collectives_mpi(entry, quantity)


def _collectives_mpi(entry: Entry, quantity: str) -> Lines:
    libraries = entry["mpi"]
    ours = ("shared", "backend")

    def cells(result: Entry) -> Sequence[str]:
        case, spreads = result["case"], result["spreads"]
        least = min(libraries, key=lambda name: spreads[name]["median"])
        sides = (spread(result, side) for side in (*ours, "gloo", *libraries))
        ratios = (figure(result, f"{least} / {side}") for side in ours)
        return str(case["world"]), format_size(case["size"]), *sides, *ratios

    header = ("ranks", "size", "shared memory", "backend", "gloo", *libraries.values())
    results = [
        result
        for result in cases(entry, collective="all_reduce")
        if result["case"].get("quantity", "wall") == quantity
    ]
    ratios = ("least of MPI / shared memory", "least of MPI / backend")
    return with_source(table((*header, *ratios), map(cells, results)), entry)


def ddp(entry: Entry) -> Lines:
    """What synchronisation adds to a step, and whole steps, of all models."""
    header = (
        "step of", "module alone", "torch on gloo adds", "torch on backend paceline adds", "paceline adds",
        "paceline adds / torch adds", "target", "whole step, paceline / torch", "target",
    )  # fmt: skip
    pair = "paceline / torch"
    rows = (
        (
            step["case"]["label"],
            spread(step, "the module alone"),
            spread(added, "torch"),
            spread(added, "torch-on-paceline"),
            spread(added, "paceline"),
            figure(added, pair),
            target(added, pair),
            figure(step, pair),
            target(step, pair),
        )
        for step, added in _steps(entry)
    )
    return with_source(table(header, rows), entry)


def ddp_summary(entry: Entry) -> Lines:
    """What synchronisation adds to a step, of the models that have a target."""
    header = ("step of", "module alone", "torch adds", "paceline adds", "paceline / torch")
    pair = "paceline / torch"
    rows = (
        (
            step["case"]["label"],
            spread(step, "the module alone"),
            spread(added, "torch"),
            spread(added, "paceline"),
            figure(added, pair),
        )
        for step, added in _steps(entry)
        if target(added, pair)
    )
    return with_source(table(header, rows), entry)


def ddp_c10d(entry: Entry) -> Lines:
    """What synchronisation adds to a step if both wrappers reduce on gloo."""
    header = ("step of", "torch on gloo adds", "paceline on gloo adds", "paceline / torch")
    rows = (
        (
            added["case"]["label"],
            spread(added, "torch"),
            spread(added, "paceline-c10d"),
            figure(added, "paceline-c10d / torch"),
        )
        for added in cases(entry, quantity="added")
        if "paceline-c10d" in added["spreads"]
    )
    return with_source(table(header, rows), entry)


def ddp_cpu(entry: Entry) -> Lines:
    """The CPU time that synchronisation adds to a step, of all ranks together."""
    header = (
        "CPU time of a step of", "module alone", "torch adds", "paceline adds", "floor adds",
        "paceline adds / torch adds", "target", "paceline adds / floor adds",
    )  # fmt: skip
    rows = (
        (
            step["case"]["label"],
            spread(step, "the module alone"),
            *(spread(added, side) for side in ("torch", "paceline", "floor")),
            figure(added, "paceline / torch"),
            target(added, "paceline / torch"),
            figure(added, "paceline / floor"),
        )
        for step, added in _steps(entry, whole="cpu", part="cpu added")
    )
    return with_source(table(header, rows), entry)


def ddp_floor(entry: Entry) -> Lines:
    """What synchronisation adds to a step, compared with the least that it could add."""
    header = (
        "step of", "waiting for the slower rank", "floor adds", "paceline adds", "paceline adds / floor adds",
        "target",
    )  # fmt: skip
    pair = "paceline / floor"
    rows = (
        (
            added["case"]["label"],
            *(spread(added, side) for side in ("waiting for the slower rank", "floor", "paceline")),
            figure(added, pair),
            target(added, pair),
        )
        for added in cases(entry, quantity="added")
        if "floor" in added["spreads"]
    )
    return with_source(table(header, rows), entry)


def ddp_steps(entry: Entry) -> Lines:
    """Whole steps of all models, on crowded cores."""
    header = ("step of", "module alone", "torch", "paceline", "paceline / torch", "target")
    pair = "paceline / torch"
    rows = (
        (
            step["case"]["label"],
            *(spread(step, side) for side in ("the module alone", "torch", "paceline")),
            figure(step, pair),
            target(step, pair),
        )
        for step in cases(entry, quantity="step")
    )
    return with_source(table(header, rows), entry)


def ddp_adamw(entry: Entry) -> Lines:
    """Whole steps with AdamW, by which rank steps which parameters."""
    header = (
        "step of", "module alone", "torch", "torch, ZeroRedundancyOptimizer", "paceline",
        "paceline, ShardedOptimizer", "paceline, HostOptimizer", "HostOptimizer / module alone", "target",
        "HostOptimizer / paceline", "target",
    )  # fmt: skip
    host = "paceline-HostOptimizer"
    sides = (
        "the module alone", "torch", "torch-ZeroRedundancyOptimizer", "paceline", "paceline-ShardedOptimizer",
        host,
    )  # fmt: skip
    pairs = (f"{host} / the module alone", f"{host} / paceline")
    rows = (
        (
            step["case"]["label"],
            *(spread(step, side) for side in sides),
            *(text for pair in pairs for text in (figure(step, pair), target(step, pair))),
        )
        for step in cases(entry, quantity="step")
    )
    return with_source(table(header, rows), entry)


def _steps(entry: Entry, *, whole: str = "step", part: str = "added") -> Iterator[tuple[Entry, Entry]]:
    """Each model's step, and what synchronisation adds to it."""
    for step in cases(entry, quantity=whole):
        for added in cases(entry, quantity=part, model=step["case"]["model"]):
            yield step, added


def memory(entry: Entry) -> Lines:
    """The peak of both ranks' memory."""
    header = (
        "peak memory of",
        "torch",
        "torch with views",
        "paceline",
        "paceline / torch with views",
        "target",
    )
    pair = "paceline / torch-views"
    rows = (
        (
            result["case"]["label"],
            *(spread(result, side) for side in ("torch", "torch-views", "paceline")),
            figure(result, pair),
            target(result, pair),
        )
        for result in cases(entry, quantity="memory")
    )
    return with_source(table(header, rows), entry)


def memory_adamw(entry: Entry) -> Lines:
    """The peak of all ranks' memory with AdamW."""
    header = (
        "peak memory of", "ranks", "torch", "torch, ZeroRedundancyOptimizer", "paceline",
        "paceline, HostOptimizer", "HostOptimizer / torch", "target",
    )  # fmt: skip
    sides = ("torch", "torch-ZeroRedundancyOptimizer", "paceline", "paceline-HostOptimizer")
    pair = "paceline-HostOptimizer / torch"
    rows = (
        (
            result["case"]["label"],
            str(result["case"]["world"]),
            *(spread(result, side) for side in sides),
            figure(result, pair),
            target(result, pair),
        )
        for result in entry["results"]
    )
    return with_source(table(header, rows), entry)


def lazy_buckets(entry: Entry) -> Lines:
    """The peak of both ranks' memory with buckets that are kept, and with lazy ones."""
    names = ("torch", "torch-views", "paceline")
    header = ("memory of", *(title for name in names for title in (name.replace("-", " with "), "lazy")))
    rows = (
        (result["what"], *(spread(result, side) for name in names for side in (name, f"{name}-lazy")))
        for result in entry["results"]
    )
    return with_source(table(header, rows), entry)


def hooks(entry: Entry) -> Lines:
    """What each communication hook sends, and its step at each rate of the link."""
    results = {(each["case"]["hook"], each["case"]["rate"]): each for each in entry["results"]}
    rates = list(dict.fromkeys(rate for _, rate in results))
    names = list(dict.fromkeys(hook for hook, _ in results))
    header = ("hook", "sent per step and rank", *(f"step at {rate}" for rate in rates))
    rows = (
        (
            hook,
            spread(results[hook, rates[0]], "sent"),
            *(spread(results[hook, rate], "step") for rate in rates),
        )
        for hook in names
    )
    return with_source(table(header, rows), entry)


def hooks_accuracy(entry: Entry) -> Lines:
    """What a network learns under each communication hook."""
    header = ("hook", "test accuracy", "standard deviation", "lowest", "highest")
    columns = ("mean", "deviation", "lowest", "highest")
    rows = (
        (hook, *(f"{100 * values[column]:.1f} %" for column in columns))
        for hook, values in entry["accuracy"].items()
    )
    return table(header, rows)


def torture(entry: Entry) -> Lines:
    """How each awkward model ends on each side."""
    rows = ((name, *ends) for name, ends in entry["cases"].items())
    return table(("case", *entry["sides"]), rows)


def torture_summary(entry: Entry) -> Lines:
    """How many awkward models each side gets right."""
    verdicts = entry["verdicts"]
    counts = [
        Counter(ends[place].partition(" (")[0] for ends in entry["cases"].values())
        for place, _ in enumerate(entry["sides"])
    ]
    rows = zip(entry["sides"], counts, strict=True)
    return table(("", *verdicts), ((side, *(str(count[each]) for each in verdicts)) for side, count in rows))


def launchers(entry: Entry) -> Lines:
    """How two ranks start and end under each launcher."""
    rows = entry["launchers"]
    names = list(dict.fromkeys(name for row in rows.values() if isinstance(row, dict) for name in row))
    header = ("launcher", *names)
    yes = {True: "yes", False: "**no**"}
    return table(
        header,
        (
            (launcher, *(yes[row[name]] for name in names))
            if isinstance(row, dict)
            else (launcher, f"not run: {row}", *("" for _ in names[1:]))
            for launcher, row in rows.items()
        ),
    )


def faults(wrapper: str, transport: str) -> Callable[[Entry], Lines]:
    """What came of each fault, with each number of ranks."""
    return lambda entry: table(*fault_tables.by_world(entry, wrapper, transport))


def same_bits(entry: Entry) -> Lines:
    """Whether the number of ranks changes the bits of a training."""

    def count(digests: Iterable[str]) -> str:
        different = len({*digests})
        return "same" if different == 1 else f"{different} different"

    yield from table(
        ("training", "with shards", "sha256", "torch's wrapper"),
        (
            (
                name,
                count([*found["paceline"].values(), found["changing"]]),
                f"`{found['changing']}`",
                count(found["torch"].values()),
            )
            for name, found in entry["cases"].items()
        ),
    )
    yield ""
    yield f"`{entry['command']}` on {entry['machine']}; Python {entry['python']}, torch {entry['torch']}."


def healing(entry: Entry) -> Lines:
    """For how long kills stop a training, how it ends, and what the killed ranks were doing."""
    for make in (heal_tables.stalls, heal_tables.ends, heal_tables.phases):
        yield from table(*make(entry))
        yield ""
    yield from (f"- {aim}" for aim in heal_tables.aims(entry))
    yield ""
    yield f"`{entry['command']}` on {entry['machine']}; Python {entry['python']}, torch {entry['torch']}."


def auto_hook(entry: Entry) -> Lines:
    """The hook auto beside the best fixed hook, at each rate."""
    yield from table(*auto_hook_tables.by_rate(entry))
    yield ""
    yield f"`{entry['command']}` on {entry['machine']}; Python {entry['python']}, torch {entry['torch']}."


def outer_loss(entry: Entry) -> Lines:
    """What the outer loop and exact averages end with, and what they send."""
    yield from table(*outer_tables.losses(entry))
    yield ""
    about = f"`{entry['command']}` on {entry['machine']}; Python {entry['python']}, torch {entry['torch']}"
    yield f"{about}; losses are means, with the least and the most."


def plan(entry: Entry) -> Lines:
    """Predicted steps beside measured ones."""
    return with_source(table(*plan_tables.errors(entry)), entry)


def faults_summary(entry: Entry) -> Lines:
    """How many faults were told, and ended as they should."""
    yield from table(*fault_tables.summary(entry))
    versions = f"Python {entry['python']}, torch {entry['torch']}"
    yield ""
    yield f"`{entry['command']}` on {entry['machine']}; {versions}."


def scale(make: Callable[[Entry], scale_tables.HeaderAndRows]) -> Callable[[Entry], Lines]:
    """A table of what grows with ranks or hosts, and how busy the machine was."""

    def render(entry: Entry) -> Lines:
        yield from with_source(table(*make(entry)), entry)
        yield scale_tables.busy(entry)

    return render


# By the name of the table: the benchmark whose figures it has, and the function that renders it.
TABLES: dict[str, tuple[str, Callable[[Entry], Lines]]] = {
    "auto-hook": ("auto_hook", auto_hook),
    "collectives": ("collectives", collectives),
    "collectives-mpi": ("collectives_mpi", collectives_mpi("wall")),
    "collectives-mpi-cpu": ("collectives_mpi", collectives_mpi("cpu")),
    "data-parallel": ("data_parallel", every_result),
    "ddp": ("ddp", ddp),
    "ddp-adamw": ("ddp_adamw", ddp_adamw),
    "ddp-busy-2": ("ddp_busy_2", ddp_steps),
    "ddp-c10d": ("ddp", ddp_c10d),
    "ddp-cpu": ("ddp", ddp_cpu),
    "ddp-floor": ("ddp", ddp_floor),
    "ddp-parameters": ("ddp_parameters", every_result),
    "ddp-summary": ("ddp", ddp_summary),
    "ddp-world-4": ("ddp_world_4", ddp_steps),
    "ddp-world-8": ("ddp_world_8", ddp_steps),
    "faults-gloo": ("faults", faults("paceline", "gloo")),
    "faults-hosts": ("faults", faults("paceline", "hosts")),
    "faults-shm": ("faults", faults("paceline", "shm")),
    "faults-summary": ("faults", faults_summary),
    "faults-torch": ("faults", faults("torch", "gloo")),
    "faults-torch-barrier": ("faults", faults("torch-barrier", "gloo")),
    "healing": ("healing", healing),
    "hooks": ("hooks", hooks),
    "hooks-accuracy": ("hooks", hooks_accuracy),
    "hosts": ("hosts", every_result),
    "launchers": ("launchers", launchers),
    "lazy-buckets": ("lazy_buckets", lazy_buckets),
    "memory": ("ddp", memory),
    "memory-adamw": ("memory", memory_adamw),
    "memory-adamw-in-use": ("memory_in_use", memory_adamw),
    "outer-loss": ("outer_loss", outer_loss),
    "outer-stop": ("outer_stop", every_result),
    "outer-times": ("outer_times", every_result),
    "plan": ("plan", plan),
    "ranks": ("ranks", every_result),
    "same-bits": ("same_bits", same_bits),
    "scale-hosts": ("scale", scale(scale_tables.hosts)),
    "scale-sizes": ("scale", scale(scale_tables.sizes)),
    "scale-times": ("scale", scale(scale_tables.times)),
    "shards": ("shards", every_result),
    "torture": ("torture", torture),
    "torture-summary": ("torture", torture_summary),
}


def write_pages() -> None:
    """Put the tables into the pages."""
    figures = load(FIGURES)
    for page in pages():
        text = page.read_text()
        if (new := rendered(text, figures)) != text:
            page.write_text(new)
            print(f"written: {page.relative_to(ROOT)}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate the tables of figures in the docs.")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="put the tables into the pages")
    action.add_argument("--check", action="store_true", help="exit with 1 if a page is not up to date")
    if parser.parse_args().write:
        write_pages()
    texts, figures = {str(page.relative_to(ROOT)): page.read_text() for page in pages()}, load(FIGURES)
    problems = [f"not up to date: {name}" for name in stale(texts, figures)]
    problems += [
        f"no figures yet: {name} (a benchmark writes them with --figures docs/figures.json)"
        for name in without_figures(texts.values(), figures)
    ]
    print("\n".join(problems), end="\n" if problems else "")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
