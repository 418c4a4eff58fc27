"""``paceline bench`` with our models and the user's: the table, the plot, JSON, and what goes wrong."""

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result
from torch import nn

from paceline.tools.bench import command as command
from paceline.tools.bench import results
from paceline.tools.bench.measure import format_seconds, timing
from paceline.tools.bench.models import Model
from paceline.tools.bench.sides import ALONE, HOST, PLAIN, SHARDED
from paceline.tools.bench.step_times import Repeats, StepResult, StepTimes, TimeBudget
from paceline.tools.main import main

SVG = "{http://www.w3.org/2000/svg}"
SIDES = [str(ALONE), *map(str, command.COMPARED_SIDES)]
OPTIMIZERS = [str(ALONE), *map(str, command.CHOICE_SIDES)]
MODELS = """
import os, signal, time
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Linear(4, 4), nn.Linear(4, 4)
        self.drop = nn.Dropout()

    def forward(self, x, scale=1.0):
        return self.drop(self.used(x * scale))

class Dict(Net):
    def forward(self, x, scale):
        return {"loss": super().forward(x, scale).sum(), "other": x}

class Reentrant(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        x = checkpoint(self.layer, x.requires_grad_(), use_reentrant=True)
        return checkpoint(self.layer, x, use_reentrant=True)

class Moody(Net):
    def forward(self, x):
        return self.used(x) * (1 + os.urandom(1)[0])

class Later(Net):
    calls = 0
    def forward(self, x):
        self.calls += 1
        return self.used(x) + (self.spare(x) if self.calls < 5 else 0)

class Clamped(Net):
    def forward(self, x):
        with torch.no_grad():
            self.used.weight.clamp_(-1, 1)
        return self.used(x)

class Sparse(Net):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 4, sparse=True)

    def forward(self, x):
        return self.used(self.table(x))

class Picky(Net):
    def forward(self, x):
        if dist.get_rank() == 1:
            raise ArithmeticError("not on this rank")
        return super().forward(x)

def x(): return torch.randn(2, 4)
def tensor(): return nn.Linear(4, 4), x()
def positional(): return Net(), (x(), 2.0), lambda out: out.abs().max()
def keywords(): return Dict(), {"x": x(), "scale": 2.0}
def reentrant(): return Reentrant(), x()
def moody(): return Moody(), x()
def later(): return Later(), x()
def picky(): return Picky(), x()
def clamped(): return Clamped(), x()
def sparse(): return Sparse(), torch.arange(4)
def module_only(): return Net()
def talks(): return print("being made") or tensor()
def listed(): return Net(), [x()]
def no_number(): return Net(), x(), lambda out: out
def frozen(): return nn.ReLU(), x()
def slow(): time.sleep(99)
def interrupting():
    os.makedirs("ranks", exist_ok=True)
    open(f"ranks/{os.getpid()}", "w").close()
    dist.barrier()
    if dist.get_rank() == 0:
        os.kill(int(os.environ["TO_INTERRUPT"]), signal.SIGINT)
    time.sleep(99)
def lazy(): return nn.LazyLinear(4), x()
def elsewhere(): return nn.Linear(4, 4, device="meta"), x()
def huge():
    net = nn.Linear(1, 1)
    net.weight = nn.Parameter(torch.zeros(1).expand(2**40))
    return net, x()
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", "--quick", *arguments], terminal_width=80)


def measured(*arguments: str) -> tuple[str, dict[str, Any]]:
    """What is printed, and what is written down."""
    result = bench(*arguments, "--json", "figures.json")
    assert result.exit_code == 0, result.output
    return result.stdout, json.loads(Path("figures.json").read_text())


def test_our_models_are_measured_shown_plotted_and_written(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    too_large = Model("a model of terabytes", partial(nn.Linear, 1, 2**40, device="meta"), (1,), 1)
    monkeypatch.setitem(command.MODELS, "too-large", too_large)
    monkeypatch.setattr(command, "QUICK_NAMES", ["too-large", "tiny-layers"])
    shown, written = measured("--plot", "plot.svg")
    assert {"machine", "versions", "options", "rows", "warnings"} <= set(written)
    assert written["options"] | {"threads": 1} == {
        "ranks": 2, "threads": 1, "model": None, "quick": True, "timeout": 600.0,
    }  # fmt: skip
    steps = [row for row in written["rows"] if row["kind"] == "step"]
    assert [row["side"] for row in steps] == SIDES
    assert all(row["seconds"]["low"] <= row["seconds"]["median"] <= row["seconds"]["high"] for row in steps)
    assert {row["side"] for row in written["rows"] if row["kind"] == "all_reduce"} >= {"gloo", "backend"}
    for word in ("all-reduce", "4 KB", "step of 200 tiny layers", *SIDES, "times as fast"):
        assert word in shown
    [left_out] = [each["warning"] for each in written["warnings"] if "left out" in each["warning"]]
    assert left_out.startswith("a model of terabytes was left out: the model does not fit: 2 ranks")
    assert "was left out" in shown
    assert max(map(len, shown.splitlines())) <= 80
    texts = [element.text or "" for element in ElementTree.parse(here / "plot.svg").iter(f"{SVG}text")]
    for word in ("torch and paceline", "step of 200 tiny layers", *SIDES, "all_reduce, 2 ranks", "gloo"):
        assert word in texts
    for row in steps:
        assert format_seconds(row["seconds"]["median"]) in texts


@pytest.mark.parametrize(
    ("model", "unused"),
    [("own_models:tensor", 0), ("own_models.py:positional", 2), ("./own_models.py:keywords", 2)],
)
@pytest.mark.usefixtures("here")
def test_own_models_are_measured_whatever_their_inputs(model: str, unused: int) -> None:
    shown, written = measured("--model", model)
    assert sides_of(written, "step") == SIDES
    assert sides_of(written, "adamw_step") == OPTIMIZERS
    assert {row["what"] for row in written["rows"]} == {model}
    [choice] = written["choices"]
    assert choice["what"] == model
    assert choice["side"] in OPTIMIZERS
    for words in (f"step of {model} with AdamW", *OPTIMIZERS, "take "):
        assert words in shown
    for row in written["rows"]:
        has_memory = row["kind"] == "adamw_step" and row["side"] != str(ALONE)
        assert (row["memory"] is not None) is has_memory
    # Dropout and all: what is random is the same on all sides.
    assert [warning for warning in written["warnings"] if warning["what"]] == []
    flagged = [note["note"] for note in written["notes"] if "find_unused_parameters=True" in note["note"]]
    assert len(flagged) == bool(unused)
    assert all(f"{unused} of 4 parameters" in note for note in flagged)
    assert ("find_unused_parameters=True" in shown) is bool(unused)


def sides_of(written: dict[str, Any], kind: str) -> list[str]:
    return [row["side"] for row in written["rows"] if row["kind"] == kind]


@pytest.mark.usefixtures("here")
def test_an_optimizer_that_refuses_the_model_is_left_out_with_its_words() -> None:
    shown, written = measured("--model", "own_models:clamped")
    assert sides_of(written, "adamw_step") == [str(ALONE), str(PLAIN), str(SHARDED)]
    [words] = [note["note"] for note in written["notes"] if "left out" in note["note"]]
    assert words.startswith(f"{HOST} was left out: a parameter that all ranks of the host share was written")
    assert f"{HOST} was left out" in shown
    assert written["choices"][0]["side"] in (str(PLAIN), str(SHARDED))


@pytest.mark.usefixtures("here")
def test_a_model_that_cannot_have_adamw_is_still_measured_with_sgd() -> None:
    shown, written = measured("--model", "own_models:sparse")
    assert sides_of(written, "step") == SIDES
    assert sides_of(written, "adamw_step") == written["choices"] == []
    words = "steps with AdamW were left out: Adam does not support sparse gradients"
    assert words in " ".join(shown.split())
    assert [each["warning"] for each in written["warnings"] if each["warning"].startswith(words)]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("reentrant", "gradients are not the average over ranks under: torch (parameter: layer."),
        ("moody", "gradients differ with the same seeds"),
    ],
)
@pytest.mark.usefixtures("here")
def test_gradients_that_differ_are_reported(model: str, words: str) -> None:
    shown, written = measured("--model", f"own_models:{model}")
    warnings = [each["warning"] for each in written["warnings"] if each["what"]]
    assert words in warnings[0]
    # With AdamW there is no torch, and a model that is not the same twice is not the same there either.
    assert len(warnings) == (2 if model == "moody" else 1)
    assert not any("; paceline" in warning for warning in warnings)
    assert warnings[0].split()[0] in shown


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--model", "own_models"], 2, "module:fn or path/to/file.py:fn (given: own_models)"),
        (["--model", "missing.py:fn"], 2, "no such file (file: missing.py"),
        (["--model", "missing:fn"], 2, "no such module (module: missing"),
        (
            ["--model", "own_models:missing"],
            2,
            "functions there: checkpoint, clamped, elsewhere, frozen, huge, interrupting,",
        ),
        (
            ["--model", "own_models:module_only"],
            2,
            "(module, inputs) or (module, inputs, loss) (returned: Net)",
        ),
        (["--model", "own_models:listed"], 2, "a dict of keyword arguments (type: list)"),
        (["--model", "own_models:no_number"], 2, "a tensor of one element (shape: (2, 4))"),
        (["--model", "own_models:frozen"], 2, "no parameter to train (model: ReLU)"),
        (["--model", "own_models:lazy"], 2, "call the model once before you return it"),
        (["--model", "own_models:elsewhere"], 2, "measured on the CPU (parameter: weight, on: meta)"),
        (["--model", "own_models:huge"], 1, "the model does not fit: 2 ranks with 4 copies each"),
        (["--plot", "plot.doc"], 2, "svgz, tif, tiff, webp (file: plot.doc)"),
        (["--json", "nowhere/figures.json"], 2, "no such folder (folder: nowhere"),
        (["-n", "1"], 2, "1 is not in the range x>=2"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
@pytest.mark.usefixtures("here")
def test_what_cannot_be_measured_is_named(arguments: list[str], code: int, words: str) -> None:
    result = bench(*arguments)
    assert (result.exit_code, result.stdout) == (code, "")
    assert words in " ".join(result.stderr.split())


@pytest.mark.usefixtures("here")
def test_what_a_model_prints_stays_out_of_the_tables(capfd: pytest.CaptureFixture[str]) -> None:
    result = bench("--model", "own_models:talks")
    assert result.exit_code == 0, result.output
    printed = capfd.readouterr()
    assert "being made" in printed.err
    assert "being made" not in printed.out + result.stdout


@pytest.mark.usefixtures("here")
def test_a_file_that_cannot_be_written_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    result = bench("--json", "figures.json")
    assert (result.exit_code, result.stdout) == (command.EXIT_USAGE, "")
    assert "it cannot be written (file: figures.json" in " ".join(result.stderr.split())


@pytest.mark.usefixtures("here")
def test_a_plot_without_matplotlib_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    result = bench("--plot", "plot.svg")
    assert (result.exit_code, result.stdout) == (command.EXIT_FAILED, "")
    assert "install it with `pip install 'paceline[plot]'`" in " ".join(result.stderr.split())


@pytest.mark.usefixtures("here")
def test_a_model_that_raises_on_a_rank_is_reported_once() -> None:
    result = bench("--model", "own_models:picky")
    assert result.exit_code == 1
    assert "raised on rank 1" in result.stderr
    assert result.stderr.count("ArithmeticError: not on this rank") == 1
    assert result.stderr.count("Traceback") == 1


@pytest.mark.usefixtures("here")
def test_what_one_side_raises_names_it() -> None:
    result = bench("--model", "own_models:later")  # all is used in the first steps
    assert result.exit_code == 1
    assert "find_unused_parameters=True" in result.stderr
    assert "this was raised under: torch" in result.stderr


@pytest.mark.usefixtures("here")
def test_a_model_that_takes_too_long_is_stopped_and_its_place_shown() -> None:
    result = bench("--model", "own_models:slow", "--timeout", "1")
    assert result.exit_code == 1
    assert "did not finish in time (timeout: 1.0 s)" in result.stderr
    assert "--timeout gives it more time" in result.stderr


def test_an_interrupted_run_leaves_nothing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TO_INTERRUPT", str(os.getpid()))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        result = bench("--model", "own_models:interrupting")
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.exit_code == 130
    assert result.stderr.endswith("stopped by SIGINT\n")
    ranks = [Path("/proc", file.name) for file in (here / "ranks").iterdir()]
    assert [rank.exists() for rank in ranks] == [False, False]


@pytest.mark.parametrize(
    ("torch_step", "ours", "words"),
    [
        ([3.0, 3.0, 3.0], [1.5, 1.5, 1.5], "adds 2.00 s under torch and 500 ms under paceline: 0.25"),
        ([3.0, 3.0, 3.0], [0.9, 1.1, 1.5], "what it adds under paceline is smaller than the noise"),
        ([0.5, 3.0, 3.0], [1.5, 1.5, 1.5], "synchronisation adds is smaller than the noise"),
    ],
)
def test_what_is_added_is_shown_if_it_is_more_than_noise(
    torch_step: list[float], ours: list[float], words: str
) -> None:
    of = dict(zip(SIDES, ([1.0] * 3, torch_step, ours, ours), strict=True))
    group = results.step_results(
        StepResult("net", StepTimes(of, of, [0.0] * 3), Repeats(3, 1), 2, 20, [], None)
    )
    assert words in group.notes[0]
    assert group.rows[-1].times_as_fast == pytest.approx(timing(torch_step).median / timing(ours).median)


@pytest.mark.parametrize(
    ("step", "repeats"),
    [(1e-4, Repeats(40, 8)), (0.05, Repeats(40, 1)), (0.5, Repeats(10, 1)), (60.0, Repeats(4, 1))],
)
def test_a_budget_is_kept_by_fewer_rounds(step: float, repeats: Repeats) -> None:
    assert TimeBudget(20.0).repeats(step, 4 * step) == repeats
