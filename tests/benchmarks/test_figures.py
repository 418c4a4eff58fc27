"""The tables of figures in the pages are those of docs/figures.json."""

from pathlib import Path
from typing import Any

import figures
import pytest
import scale_tables
from targets import Row, save_figures

from paceline.tools.bench.measure import Size, Timing


def timings(**medians: float) -> dict[str, Timing]:
    return {side: Timing(median, 0.9 * median, 1.1 * median) for side, median in medians.items()}


def collectives_rows() -> list[Row]:
    case = {"collective": "all_reduce", "world": 2, "size": 4096}
    sides = timings(gloo=2.6e-3, shared=78e-6, memcpy=1e-6)
    return [
        Row("copy_", timings(gloo=1.0), "GB/s", 7.0, None),
        Row("4 KB", sides, "gloo / shared", 33.3, 20.0, at_most=False, spread=(26.0, 38.0), case=case),
        Row("4 KB", sides, "shared / memcpy", 1.755, 1.5, spread=(1.0, 2.0), case=case),
    ]


def ddp_rows() -> list[Row]:
    case: dict[str, str | int] = {"model": "conv", "label": "conv net"}
    step = {"the module alone": Timing(0.0386, 0.037, 0.0424), **timings(torch=0.06, paceline=0.045)}
    added = timings(torch=0.0248, paceline=0.0069, floor=0.006) | {
        "paceline-c10d": Timing(0.02, 0.01, 0.03),
        "waiting for the slower rank": Timing(0.001, 0.001, 0.002),
    }
    cpu = {"the module alone": Timing(0.07, 0.06, 0.08)}
    pair = "paceline / torch"
    held = {side: Size(nbytes, nbytes, nbytes) for side, nbytes in (("torch", 2e8), ("paceline", 1e8))}
    of_added, of_cpu = case | {"quantity": "added"}, case | {"quantity": "cpu added"}
    return [
        Row("step", step, pair, 0.75, 1.0, spread=(0.7, 0.8), case=case | {"quantity": "step"}),
        Row("adds", added, pair, 0.28, 1 / 5, spread=(0.2, 0.5), case=of_added),
        Row("adds", added, "paceline-c10d / torch", 0.81, None, case=of_added),
        Row("adds", added, "paceline / floor", 1.15, 1.3, case=of_added),
        Row("cpu", cpu, pair, 0.75, None, case=case | {"quantity": "cpu"}),
        Row("cpu adds", timings(torch=0.03, paceline=0.01, floor=0.008), pair, 0.33, 0.4, case=of_cpu),
        Row("memory", held, "paceline / torch-views", 1.0, 1.0, case=case | {"quantity": "memory"}),
    ]


@pytest.fixture
def saved(tmp_path: Path) -> dict[str, Any]:
    """The entries of benchmarks that were run one after the other."""
    path = tmp_path / "figures.json"
    save_figures(path, "collectives", [])
    save_figures(path, "ddp", ddp_rows())
    save_figures(path, "ddp_busy_2", ddp_rows())
    save_figures(path, "collectives", collectives_rows())
    return figures.load(path)


def page(name: str, table: str = "| by hand |\n") -> str:
    return f"before\n<!-- figures: {name} begin -->\n{table}<!-- figures: {name} end -->\nafter\n"


def test_a_table_is_replaced_and_the_rest_of_the_page_stays(saved: dict[str, Any]) -> None:
    text = figures.rendered(page("ddp-summary"), saved)
    assert text.startswith("before\n<!-- figures: ddp-summary begin -->\n| step of | module alone |")
    assert text.endswith("; medians (quartiles).\n<!-- figures: ddp-summary end -->\nafter\n")
    assert "by hand" not in text


@pytest.mark.parametrize(
    ("name", "row"),
    [
        (
            "collectives",
            "| 2 | 4 KB | 2.60 ms (2.34 to 2.86) | 78.0 us (70.2 to 85.8) | 33 (26 to 38) | at least 20 "
            "| 1.75 (1.00 to 2.00) | at most 1.5: **missed** |  |  |",
        ),
        (
            "ddp-summary",
            "| conv net | 38.6 ms (37.0 to 42.4) | 24.8 ms (22.3 to 27.3) | 6.90 ms (6.21 to 7.59) "
            "| 0.28 (0.20 to 0.50) |",
        ),
        (
            "ddp-floor",
            "| conv net | 1.00 ms (1.00 to 2.00) | 6.00 ms (5.40 to 6.60) | 6.90 ms (6.21 to 7.59) | 1.15 "
            "| at most 1.3 |",
        ),
        (
            "ddp-cpu",
            "| conv net | 70.0 ms (60.0 to 80.0) | 30.0 ms (27.0 to 33.0) | 10.0 ms (9.0 to 11.0) "
            "| 8.00 ms (7.20 to 8.80) | 0.33 | at most 0.4 |  |",
        ),
        (
            "ddp-c10d",
            "| conv net | 24.8 ms (22.3 to 27.3) | 20.0 ms (10.0 to 30.0) | 0.81 |",
        ),
        (
            "ddp-busy-2",
            "| conv net | 38.6 ms (37.0 to 42.4) | 60.0 ms (54.0 to 66.0) | 45.0 ms (40.5 to 49.5) "
            "| 0.75 (0.70 to 0.80) | at most 1 |",
        ),
        (
            "memory",
            "| conv net | 200 MB (200 to 200) |  | 100 MB (100 to 100) | 1.00 | at most 1 |",
        ),
    ],
)
def test_a_row_has_medians_quartiles_and_whether_the_target_was_met(
    name: str, row: str, saved: dict[str, Any]
) -> None:
    table = figures.rendered(page(name), saved).splitlines()
    assert row in table


def test_a_benchmark_replaces_its_own_entry_only(saved: dict[str, Any]) -> None:
    assert list(saved) == ["collectives", "ddp", "ddp_busy_2"]
    assert [result["what"] for result in saved["collectives"]["results"]] == ["copy_", "4 KB"]
    assert {"command", "machine", "python", "torch"} <= set(saved["ddp"])


def test_every_result_is_listed_with_all_its_figures(saved: dict[str, Any]) -> None:
    table = figures.rendered(page("hosts"), {"hosts": saved["collectives"]}).splitlines()
    assert "|  |  | shared / memcpy: 1.75 (1.00 to 2.00) | at most 1.5: **missed** |" in table


def test_hooks_have_a_column_per_rate_and_their_accuracy() -> None:
    sent = Size(5.25e6, 5.2e6, 5.3e6)
    rows = [
        Row(
            f"int8 at {rate}",
            {"step": Timing(seconds, seconds, seconds), "sent": sent},
            "step / torch",
            1.0,
            None,
            case={"hook": "int8", "rate": rate},
        )
        for rate, seconds in (("100mbit", 0.132), ("1gbit", 0.036))
    ]
    accuracy = {"int8": {"mean": 0.971, "deviation": 0.004, "lowest": 0.96, "highest": 0.98}}
    entry = saved_entry(rows, accuracy=accuracy)
    assert "| int8 | 5.25 MB (5.20 to 5.30) | 132 ms (132 to 132) | 36.0 ms (36.0 to 36.0) |" in [
        *figures.hooks(entry)
    ]
    assert [*figures.hooks_accuracy(entry)][-1] == "| int8 | 97.1 % | 0.4 % | 96.0 % | 98.0 % |"


def saved_entry(rows: list[Row], **more: Any) -> dict[str, Any]:
    """What a benchmark would save."""
    kept: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("targets.merge", lambda _, name, entry: kept.update({name: entry}))
        save_figures(Path("unused"), "benchmark", rows, **more)
    return kept["benchmark"]


def test_torture_cases_are_listed_and_counted() -> None:
    entry = {
        "sides": ["torch, default flags", "torch, best flags", "paceline, no flag"],
        "verdicts": ["right", "error"],
        "cases": {"a": ["error", "right (`flag`)", "right"], "b": ["error", "error", "right"]},
    }
    assert [*figures.torture(entry)][2:] == [
        "| a | error | right (`flag`) | right |",
        "| b | error | error | right |",
    ]
    summary = [*figures.torture_summary(entry)]
    assert summary[3] == "| torch, best flags | 1 | 1 |"
    assert summary[-1] == "| paceline, no flag | 2 | 0 |"


def test_launchers_are_listed_with_what_did_not_work_and_what_was_not_run() -> None:
    entry = {"launchers": {"a": {"starts": True, "ends": False}, "b": "not installed: b"}}
    assert [*figures.launchers(entry)] == [
        "| launcher | starts | ends |",
        "|---|---|---|",
        "| a | yes | **no** |",
        "| b | not run: not installed: b |  |",
    ]


def test_scale_has_times_sizes_and_hosts_and_says_how_busy_the_machine_was() -> None:
    on_one_host = {"memory per rank": Size(4.4e6, 4.3e6, 4.5e6), "recording per rank": Size(5e5, 5e5, 5e5)}
    sides = timings(**dict.fromkeys(scale_tables.TIMES, 0.1)) | on_one_host | {"page": Size(7e4, 7e4, 7e4)}
    case: dict[str, str | int] = {"quantity": "ranks", "ranks": 64}
    sent = dict.fromkeys(scale_tables.HOST_SIDES, Size(3210.0, 3200.0, 3360.0))
    rows = [
        Row("64 ranks", sides, "steps", 16, None, case=case),
        Row("bytes of 8 hosts", sent, "ratio", 1.0, None, case={"quantity": "hosts, bytes", "hosts": 8}),
    ]
    entry = saved_entry(rows, load=4.5)
    times, sizes, hosts = (
        [*figures.TABLES[name][1](entry)] for name in ("scale-times", "scale-sizes", "scale-hosts")
    )
    assert times[2:3] == ["| 64 |" + " 100 ms (90 to 110) |" * 5]
    assert sizes[2:3] == ["| 64 | 4400 KB (4300 to 4500) | 500 KB (500 to 500) | 70.0 KB (70.0 to 70.0) |"]
    assert hosts[2:3] == ["| bytes of 8 hosts |" + " 3.21 KB (3.20 to 3.36) |" * 2]
    assert hosts[-1] == "Load average of the machine before the run: 4.5."


def test_a_page_is_stale_until_it_is_written(saved: dict[str, Any]) -> None:
    texts = {"a": page("ddp"), "b": page("hosts"), "c": "no table\n"}
    assert figures.stale(texts, saved) == ["a"]
    assert figures.without_figures(texts.values(), saved) == ["hosts"]
    written = {name: figures.rendered(text, saved) for name, text in texts.items()}
    assert figures.stale(written, saved) == []
    assert written["b"] == texts["b"]


def test_a_table_of_a_side_that_was_not_measured_stays() -> None:
    entry = saved_entry([row for row in ddp_rows() if row.what == "step"])
    for name in ("ddp-c10d", "ddp-cpu", "ddp-floor"):
        assert figures.rendered(page(name), {"ddp": entry}) == page(name)


def test_an_unknown_table_is_an_error() -> None:
    with pytest.raises(KeyError, match="nosuch"):
        figures.rendered(page("nosuch"), {})


def test_the_pages_are_up_to_date() -> None:
    texts = {page.name: page.read_text() for page in figures.pages()}
    assert figures.stale(texts, figures.load(figures.FIGURES)) == []
    assert sum(text.count("<!-- figures:") for text in texts.values()) == 2 * sum(
        len(figures.BLOCK.findall(text)) for text in texts.values()
    )


def test_every_table_has_figures() -> None:
    texts = [page.read_text() for page in figures.pages()]
    assert figures.without_figures(texts, figures.load(figures.FIGURES)) == []


def test_losses_have_three_digits_and_bytes_a_unit_in_which_they_can_be_read() -> None:
    sent = {"exact averages": Size(1.658e6, 1.658e6, 1.658e6), "outer loop": Size(3943.0, 3792.0, 4001.0)}
    rows = [
        Row("loss", {}, "exact averages", 0.7625, None, spread=(0.7541, 0.7718)),
        Row("loss", {}, "outer loop", 0.766, None, spread=(0.7542, 0.7759)),
        Row("loss", {}, "outer / exact", 1.012, 1.01, spread=(0.9993, 1.0119)),
        Row("bytes", sent, "exact / outer", 420.6, 100, at_most=False),
        Row("bytes", sent, "exact / outer, aim", 420.6, 400, at_most=False),
    ]
    loss, nbytes = [*figures.TABLES["outer-loss"][1](saved_entry(rows))][2:4]
    assert loss == (
        "| loss | 0.762 (0.754 to 0.772) | 0.766 (0.754 to 0.776) | outer / exact: 1.012 (0.999 to 1.012) "
        "| at most 1.01: **missed** |"
    )
    assert nbytes == (
        "| bytes | 1658 KB (1658 to 1658) | 3.94 KB (3.79 to 4.00) | exact / outer: 421 "
        "| at least 100, aim at least 400 |"
    )


def test_predictions_are_beside_what_was_measured() -> None:
    case: dict[str, str | int] = {"model": "linears", "rate": "300mbit", "hook": "int8"}
    sides = timings(predicted=0.1, measured=0.12)
    row = Row("6M, int8 at 300mbit (held out)", sides, "error", 0.17, 0.15, case=case)
    assert [*figures.TABLES["plan"][1](saved_entry([row]))][2] == (
        "| 6M | 300mbit, held out | int8 | 100 ms | 120 ms (108 to 132) | 17% | at most 15%: **missed** |"
    )
