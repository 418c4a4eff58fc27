import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_digits_learns_and_tells_accuracy_and_speed() -> None:
    command = [sys.executable, EXAMPLES / "digits.py", "--epochs", "2"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    told = re.search(r"test accuracy ([\d.]+)%, ([\d,]+) images/s on 2 CPU replicas", result.stdout)
    assert told is not None, result.stdout
    assert float(told[1]) > 80
