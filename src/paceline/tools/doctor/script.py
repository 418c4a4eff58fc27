"""The script, the module or the program that ranks would run."""

import importlib.util
import os
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from paceline.tools.doctor.asked import Target
from paceline.tools.doctor.finding import Finding, fault, ok

CHECK = "script"


@dataclass(frozen=True)
class Script:
    """What was found of it; ``problem`` is why ranks could not run it, ``fix`` the line that mends it."""

    target: str
    problem: str | None = None
    fix: str = ""


def gather(target: str, kind: Target) -> Script:
    """Look for the target as a rank would, without running it."""
    return {Target.SCRIPT: _script, Target.MODULE: _module, Target.PROGRAM: _program}[kind](target)


def _script(target: str) -> Script:
    quoted = shlex.quote(target)
    # A folder or an archive is run by what is in it, as python does.
    path = Path(target, "__main__.py") if Path(target).is_dir() else Path(target)
    if path.suffix in (".zip", ".pyz") and path.exists():
        return Script(target)
    try:
        compile(path.read_bytes(), str(path), "exec")
    except FileNotFoundError:
        return Script(target, f"there is no such file (here: {Path.cwd()})", f"ls -l {quoted}")
    except PermissionError:
        return Script(target, "it cannot be read", f"chmod a+r {quoted}")
    except OSError as error:
        return Script(target, f"it cannot be read ({error.strerror})", f"ls -l {quoted}")
    except (SyntaxError, ValueError) as error:
        return Script(target, f"it is no Python ({error})", f"{sys.executable} -m py_compile {quoted}")
    return Script(target)


def _module(target: str) -> Script:
    # Where a rank would look first.
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - sys.path has strings
    try:
        is_there = importlib.util.find_spec(target) is not None
    except Exception as error:
        return Script(target, f"a package on the way to it cannot be imported ({error})", _import(target))
    finally:
        del sys.path[0]
    return Script(target) if is_there else Script(target, "there is no such module", _import(target))


def _import(target: str) -> str:
    return f"{sys.executable} -c 'import {target}'"


def _program(target: str) -> Script:
    if shutil.which(target) is not None:
        return Script(target)
    if Path(target).is_file():
        return Script(target, "it cannot be executed", f"chmod a+x {shlex.quote(target)}")
    return Script(target, "there is no such program", f"command -v {shlex.quote(target)}")


def judge(script: Script) -> Finding:
    """Say whether ranks can run it."""
    if script.problem is not None:
        return fault(CHECK, f"{script.target}: {script.problem}", script.fix, target=script.target)
    return ok(CHECK, f"{script.target} can be read", target=script.target)
