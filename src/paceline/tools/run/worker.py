"""What runs in each rank: a script as python would run it, or a function that was sent.

It is run by its path and made of the standard library alone, so that a script finds what ``python script.py``
would give it: neither torch nor paceline is imported before the script asks for it.

    worker.py [--patch] --script|--module|--call TARGET ARGUMENT...
"""

import contextlib
import ctypes
import faulthandler
import json
import os
import pickle
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import Any

# The folder for what a rank writes down. Every process that a rank starts inherits it, and is known by it.
FOLDER = "PACELINE_RUN_FOLDER"
PATCH = Path(__file__).with_name("on_import.py")
_PR_SET_PDEATHSIG = 1
ENDED = 128 + signal.SIGTERM
INTERRUPTED = 128 + signal.SIGINT
# How long a rank that was asked to end may take to notice.
NOTICE_SECONDS = 1.0
LONGEST_MESSAGE = 100_000
# Whose frames lead to the program, in a traceback.
LEADING = {
    __file__,
    "<frozen runpy>",
    "<frozen importlib._bootstrap>",
    "<frozen importlib._bootstrap_external>",
}

_noticed = threading.Event()
_forking = threading.local()


def main() -> None:
    """Run what the arguments say, and write down how it failed."""
    arguments = sys.argv[1:]
    if arguments[0] == "--patch":
        runpy.run_path(str(PATCH))
        del arguments[0]
    run, target = RUNS[arguments[0]], arguments[1]
    sys.argv[:] = [target, *arguments[2:]]
    _end_when_asked()
    _end_with_parent()
    _write_down_crashes()
    try:
        run(target)
        return
    except SystemExit as exit_:
        # Python turns it into an exit code, and shows its message.
        if exit_.code is not None and exit_.code != 0:
            _write_down(exit_)
        raise
    except BaseException as error:
        code = exit_code(error)
        _show(error)
    # Outside of the handler, so that what the error's frames hold is let go of first.
    sys.exit(code)


def _run_script(path: str) -> None:
    if Path(path).is_dir() or Path(path).suffix in (".zip", ".pyz"):
        _put_on_path(path)
        _new_main()
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]  # as python does
        return
    _put_on_path(str(Path(path).resolve().parent))
    module = _new_main()
    path = module.__file__ = os.path.abspath(path)  # noqa: PTH100 - python does not follow links here either
    module.__dict__["__cached__"] = None
    loader = module.__loader__ = SourceFileLoader("__main__", path)
    exec(loader.source_to_code(Path(path).read_bytes(), path), module.__dict__)  # noqa: S102 - it is what was asked for


def _run_module(name: str) -> None:
    _put_on_path(str(Path.cwd()))
    _new_main()
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]  # what ``python -m`` does


def _run_call(path: str) -> None:
    """Call the function that was sent in the file, and send back what it returns."""
    _put_on_path("")
    main = _new_main()
    sent = pickle.loads(Path(path).read_bytes())  # noqa: S301 - from the process that started this one
    sys.path[:] = sent["path"]
    main.__file__ = sent["main"]
    fn, args, kwargs = pickle.loads(sent["call"])  # noqa: S301 - as above
    result = _packed(fn(*args, **kwargs))
    _save(Path(os.environ[FOLDER]) / f"{os.environ['RANK']}.result", result)


def _packed(result: object) -> bytes:
    import cloudpickle

    try:
        packed: bytes = cloudpickle.dumps(result)
    except Exception as error:
        kind = type(result).__qualname__
        raise TypeError(f"the result must be picklable, to be sent back (type: {kind}): {error}") from error
    return packed


RUNS: dict[str, Callable[[str], None]] = {
    "--script": _run_script,
    "--module": _run_module,
    "--call": _run_call,
}


def _put_on_path(folder: str) -> None:
    """Have modules looked for in ``folder`` first, and not beside this file."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _new_main() -> ModuleType:
    """A main module that is the program's own, and stays so while threads and exit handlers run."""
    module = ModuleType("__main__")
    module.__dict__["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = module
    # By which multiprocessing's children name what is the main module's.
    if "__mp_main__" in sys.modules:
        sys.modules["__mp_main__"] = module
    return module


def _end_when_asked() -> None:
    """SIGTERM ends a rank through SystemExit, so that exit handlers run; by force if it cannot notice."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, _end)
    os.register_at_fork(
        before=_wait_with_ending, after_in_parent=_end_again, after_in_child=_be_ended_plainly
    )
    threading.Thread(target=_end_by_force, args=(reader,), name="paceline-end", daemon=True).start()


def _end_with_parent() -> None:
    """Get a SIGTERM when the process that has started this one is killed."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001 - a signal handler's arguments
    _noticed.set()
    raise SystemExit(ENDED)


def _wait_with_ending() -> None:
    """A forked process has our pipe for a moment: a SIGTERM that it gets then must not be taken for ours."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _end_again() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _be_ended_plainly() -> None:
    """In a process that the script forks, SIGTERM means what it always means."""
    if signal.getsignal(signal.SIGTERM) is _end:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
    _end_again()


def _end_by_force(reader: int) -> None:
    """End the process if its main thread is busy outside of Python, and cannot notice."""
    while signum := os.read(reader, 1):
        is_ours = signum[0] == signal.SIGTERM and signal.getsignal(signal.SIGTERM) is _end
        if is_ours and not _noticed.wait(NOTICE_SECONDS):
            os._exit(ENDED)


def _write_down_crashes() -> None:
    """Have the interpreter write where it was when a signal such as SIGSEGV ends it."""
    if folder := os.environ.get(FOLDER):
        file = (Path(folder) / f"{os.environ['RANK']}.crash").open("w")
        faulthandler.enable(file, all_threads=False)


def _show(error: BaseException) -> None:
    """Leave the traceback to whoever started this rank, and tell a hook of the program's own."""
    is_left = _write_down(error)
    # torch puts one in place that prints the traceback with the rank's number.
    is_programs = sys.excepthook is not sys.__excepthook__ and not _is_torchs(sys.excepthook)
    if is_programs or not is_left:
        sys.excepthook(type(error), error, _below_this_file(error))


def _is_torchs(hook: object) -> bool:
    return getattr(hook, "__module__", "").partition(".")[0] == "torch"


def _write_down(error: BaseException) -> bool:
    """Write what happened where the parent looks for it."""
    folder, rank = os.environ.get(FOLDER), os.environ.get("RANK")
    if folder is None or rank is None:
        return False
    try:
        _save(Path(folder) / f"{rank}.json", json.dumps(note(error)).encode())
    except OSError:
        return False
    return True


def note(error: BaseException) -> dict[str, Any]:
    """What is told of ``error``: the moment, the place, the words, and what it began with."""
    text = "".join(traceback.format_exception(type(error), error, _below_this_file(error)))
    return {
        "time": time.time(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        # The process may still be ended otherwise, before it has exited.
        "code": exit_code(error),
        "kind": type(error).__qualname__,
        "message": _text(error),
        "trace": text[-LONGEST_MESSAGE:],
        "roots": [{"types": _types(root), "message": _text(root)} for root in _roots(error)],
    }


def exit_code(error: BaseException) -> int:
    """The exit code that Python gives for what was raised, as a shell has it."""
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code & 0xFF
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def _text(error: BaseException) -> str:
    try:
        return str(error)[:LONGEST_MESSAGE]
    except Exception:
        return "(its message cannot be shown)"


def _types(error: BaseException) -> list[str]:
    return [f"{base.__module__}.{base.__qualname__}" for base in type(error).__mro__]


def _roots(error: BaseException) -> Iterator[BaseException]:
    """The errors with which it began: followed by causes and contexts, into groups."""
    seen = {id(error)}
    while (earlier := _before(error)) is not None and id(earlier) not in seen:
        seen.add(id(earlier))
        error = earlier
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _roots(inner)
    else:
        yield error


def _before(error: BaseException) -> BaseException | None:
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _below_this_file(error: BaseException) -> TracebackType | None:
    """The traceback without the frames that lead to the program."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in LEADING:
        trace = trace.tb_next
    return trace


def _save(path: Path, data: bytes) -> None:
    """Write a file that is whole as soon as it is there."""
    draft = path.with_suffix(path.suffix + ".draft")
    draft.write_bytes(data)
    draft.replace(path)


if __name__ == "__main__":
    main()
