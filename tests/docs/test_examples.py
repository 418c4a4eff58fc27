"""The examples, run as their docstrings say: what they print, and what they leave."""

import ast
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from pages import link_repository
from running import Ran, in_rank

from paceline.testing import run_ranks
from paceline.testing.hosts import why_not

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TIMEOUT = 100.0
# Those of training libraries are run where the libraries are tested.
ELSEWHERE = {"accelerate_loop", "lightning_fit", "ray_train", "transformers_trainer"}
NAMES = sorted({path.stem for path in EXAMPLES.glob("*.py")} - ELSEWHERE)
ROUNDING = r"(?:\d\.\de-1[5-9]|0\.0e\+00)"
# What each is to print, a line each.
CLAIMS = {
    "any_launcher": [
        r"\[0\] rank 0 of 2, local rank 0, on cpu",
        r"\[1\] rank 1 of 2, local rank 1, on cpu",
        r"\[0\] sha256 [0-9a-f]{64}",
    ],
    "custom_hook": [
        r"\[0\] no hook hands over 33,796 bytes a step, 100\.0%; loss 0\.0\d\d at the end",
        r"\[0\] in_half hands over 16,898 bytes a step, 50\.0%; loss 0\.0\d\d at the end",
        r"\[0\] Signs hands over 1,061 bytes a step, 3\.1%; loss 0\.0\d\d at the end",
    ],
    "healing": [
        r"\[0\] process \d+ did 40 of 40 steps",
        r"\[1\] process \d+ did 2[78] of 40 steps",
        r"\[0\] sha256 [0-9a-f]{64}",
    ],
    "one_copy": [
        r"\[0\] state on this rank: 2\.4 MB with AdamW, 1\.2 MB with parts",
        r"\[0\] the same parameters: True",
    ],
    "outer_loop": [
        r"\[0\] step 200: loss 0\.\d\d\d",
        r"\[0\] the same model on all ranks: True",
    ],
    "plain_loop": [
        r"\[0\] test accuracy 9\d\.\d% on 403 points, put together from 2 ranks",
        r"\[0\] build/plain_loop\.pt in one process: 0 of 403 answers differ",
    ],
    "same_bits": [
        r"\[0\] 30 steps on 2 ranks, sha256 [0-9a-f]{64}",
    ],
    "token_weights": [
        r"\[0\] 385 tokens in 4 micro-batches on each of 2 ranks",
        rf"\[0\] weighed by tokens: gradients are off those of one process by {ROUNDING} of their norm",
        r"\[0\] plain mean: gradients are off those of one process by \d\.\de-01 of their norm",
    ],
    "two_hosts": [
        rf"\[{rank}\] a step sends 6\.3\d MB with torch's wrapper, 4\.2\d MB with paceline's"
        for rank in (0, 2)
    ],
    "uneven_inputs": [
        r"\[0\] 53 samples in 4 batches, the last of 5",
        r"\[1\] 123 samples in 8 batches, the last of 11",
        r"\[0\] training moved parameters by up to 0\.\d\d",
        *(rf"\[{rank}\] parameters differ from those of one process by {ROUNDING}" for rank in (0, 1)),
    ],
}


def command(name: str) -> str:
    """How an example's docstring says that it is run."""
    said = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text())) or ""
    found = re.search(
        rf"^(?:paceline run|sudo \$\(which python\)) .*\bexamples/{name}\.py\b.*$", said, re.MULTILINE
    )
    assert found is not None, f"examples/{name}.py does not say how it is run"
    return found[0]


def run(words: list[str], folder: Path) -> Ran:
    """Run an example's command where the examples are, but for what it writes."""
    (folder / "examples").symlink_to(EXAMPLES)
    if words[0] == "paceline":
        [ran] = run_ranks(in_rank, 1, args=(words[1:], folder), backend=None, timeout=TIMEOUT)
        assert isinstance(ran, Ran)
        return ran
    ended = subprocess.run(
        [sys.executable, *words[3:]], cwd=folder, capture_output=True, text=True, timeout=TIMEOUT
    )
    return Ran(ended.returncode, ended.stdout, ended.stderr, [])


@pytest.mark.parametrize("name", NAMES)
def test_an_example_and_the_index_of_them_tell_the_same_command(name: str) -> None:
    assert f"`{command(name)}`" in (ROOT / "docs/examples.md").read_text()


@pytest.mark.parametrize("name", sorted({*NAMES} - {"digits"}))
def test_an_example_shows_what_it_claims(name: str, tmp_path: Path) -> None:
    if name == "two_hosts" and (reason := why_not()) is not None:
        pytest.skip(reason)
    ran = run(command(name).split(), tmp_path)
    assert (ran.code, ran.left) == (0, []), ran.stderr
    for claim in CLAIMS[name]:
        assert any(re.fullmatch(claim, line) for line in ran.lines), (claim, ran.stdout)


def test_two_hosts_says_why_there_can_be_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit, match="two hosts cannot be made here: network namespaces need root"):
        runpy.run_path(str(EXAMPLES / "two_hosts.py"), run_name="__main__")


def test_the_demo_learns_tells_its_speed_and_leaves_a_page(tmp_path: Path) -> None:
    folder = link_repository(tmp_path / "paceline")
    ran = subprocess.run(["make", "demo"], cwd=folder, capture_output=True, text=True, timeout=TIMEOUT)
    assert ran.returncode == 0, ran.stderr
    told = re.search(r"test accuracy ([\d.]+)% \(torch's wrapper: ([\d.]+)%\)", ran.stdout)
    assert told is not None, ran.stdout
    assert min(map(float, told.groups())) > 95
    assert re.search(r"[\d,]+ images/s on 2 ranks, [\d.]+ times torch's [\d,]+", ran.stdout)
    assert re.search(r"paceline: step \d+, .* images/s", ran.stderr)
    # Half of the wall time is training with torch's wrapper.
    assert re.search(r"Pauses take \d+% of the wall time \(.*training of another model", ran.stdout)
    assert "- Another model is trained between these steps: look at its time\n" in ran.stdout
    assert (folder / "build/demo/report.html").exists()
