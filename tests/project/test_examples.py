"""The demo: what it prints, and what it leaves."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_digits_learns_tells_its_speed_and_leaves_a_recording(tmp_path: Path) -> None:
    paceline = Path(sys.executable).with_name("paceline")
    command = [paceline, "run", "-n", "2", "--record", tmp_path, EXAMPLES / "digits.py", "--epochs", "3"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    told = re.search(r"test accuracy ([\d.]+)% \(torch's wrapper: ([\d.]+)%\)", result.stdout)
    assert told is not None, result.stdout
    assert min(map(float, told.groups())) > 80
    assert re.search(r"[\d,]+ images/s on 2 ranks, [\d.]+ times torch's [\d,]+", result.stdout)
    assert re.search(r"paceline: step 32, .* images/s", result.stderr)
    shown = subprocess.run([paceline, "report", tmp_path], capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0, shown.stderr
    assert (tmp_path / "report.html").exists()
