"""The program that runs in each rank: it runs a script as python would, or a function that was sent.

It is run by its path and uses the standard library only, so that a script finds what ``python script.py``
would give it: neither torch nor paceline is imported before the script imports it.

    worker.py [--spare] --script|--module|--call TARGET ARGUMENT...

A spare imports what the script imports, and waits until it is told which rank it is.
"""

import ast
import atexit
import contextlib
import ctypes
import faulthandler
import importlib
import json
import multiprocessing
import os
import pickle
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import Any

# The variable with the folder for a rank's error report. Every process that a rank starts inherits it, and is
# recognised by it.
FOLDER = "PACELINE_RUN_FOLDER"
_NATIVE_THREADS = Path(__file__).parents[2] / "comm" / "native_threads.py"
_PR_SET_PDEATHSIG = 1
EXIT_SIGTERM = 128 + signal.SIGTERM
EXIT_SIGINT = 128 + signal.SIGINT
# When the main thread is woken after a SIGINT or SIGTERM. If it has not run the handler of a SIGTERM
# by then, the process exits by force.
WAKE_AFTER_SECONDS = (0.05, 0.2, 0.75)
# After how long the process looks whether the SystemExit of a SIGTERM was dropped, and how often it raises it
# again.
LOOK_SECONDS = 0.5
MOST_RAISED_AGAIN = 2
LONGEST_MESSAGE = 100_000
# What a training imports at its first step, which takes a second.
_SPARE_IMPORTS = ("torch._dynamo", "paceline")
# The file of each frame that imports something.
_IMPORT_FILE = "<frozen importlib._bootstrap>"
# Files whose frames are above the program's own in a traceback.
LAUNCHER_FILES = {
    __file__,
    "<frozen runpy>",
    _IMPORT_FILE,
    "<frozen importlib._bootstrap_external>",
}

# Set when the handler of a SIGTERM has run; when what it raised may have been dropped, see
# Note [Dropped exits]; and when the program is over.
_sigterm_handled = threading.Event()
_may_be_dropped = threading.Event()
_program_ended = threading.Event()
# The process of the rank itself, which is not that of a child that the script forks.
_rank_pid = 0
_forking = threading.local()


def main() -> None:
    """Run what the arguments name; if it fails, write an error report."""
    arguments = sys.argv[1:]
    if is_spare := arguments[0] == "--spare":
        del arguments[0]
    run, target = RUNS[arguments[0]], arguments[1]
    sys.argv[:] = [target, *arguments[2:]]
    if is_spare:
        _wait_as_spare(Path(target) if run is _run_script else None)
    global _rank_pid
    _rank_pid = os.getpid()
    _exit_on_sigterm()
    _die_with_parent()
    atexit.register(_wait_for_torchs_threads)  # the first one, so that it runs after those of the script
    _report_crashes()
    _keep_temporary_files()
    try:
        run(target)
        return
    except SystemExit as exit_:
        # Python turns it into an exit code, and shows its message.
        if exit_.code is not None and exit_.code != 0:
            _write_report(exit_)
        raise
    except BaseException as error:
        code = exit_code(error)
        _show(error)
        if (watcher := sys.modules.get("paceline.watch.watcher")) is not None:
            watcher.note_end(error)
    finally:
        _program_ended.set()
    # After the except block, so that the objects in the error's frames are released first.
    sys.exit(code)


def _wait_as_spare(script: Path | None) -> None:
    """Import what the script will import; then fork a rank whenever the launcher says so, and return in it.

    See Note [Forked spares] in spares.py.
    """
    _die_with_parent()
    said, nothing = os.dup(1), os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 1)  # what modules print is not for the launcher
    if script is not None and script.is_file():
        _put_on_path(str(script.resolve().parent))
        for name in (*_SPARE_IMPORTS, *imports_of(script)):
            # The script itself will raise it, or catch it; some modules exit without a rank.
            with contextlib.suppress(Exception, SystemExit):
                importlib.import_module(name)
    os.write(said, b"ready\n")
    for line in iter(sys.stdin.readline, ""):
        order = json.loads(line)
        can_fork = len(list(Path("/proc/self/task").iterdir())) == 1
        if not can_fork or _fork_orphan(order["launcher"]):
            os.write(said, b"%d\n" % os.getpid())
            os.environ.update(order["environment"])
            for number, path in enumerate(order["output"], start=1):
                os.dup2(os.open(path, os.O_WRONLY), number)
            os.dup2(nothing, 0)
            os.close(said)
            return
    sys.exit()  # the run has ended


def _fork_orphan(launcher: int) -> bool:
    """Fork a process whose parent is the launcher; whether this is that process."""
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        return False
    if os.fork():
        os._exit(0)
    os.setsid()
    while os.getppid() != launcher:
        time.sleep(0.001)
    return True


def imports_of(script: Path) -> list[str]:
    """The modules that a script imports at its top level."""
    names: list[str] = []
    with contextlib.suppress(SyntaxError, ValueError):  # the script will raise it
        for node in ast.parse(script.read_bytes()).body:
            if isinstance(node, ast.Import):
                names += [each.name for each in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.append(node.module)
    return names


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
    """Call the function that is pickled in the file, and pickle its result into another."""
    _put_on_path("")
    main = _new_main()
    sent = pickle.loads(Path(path).read_bytes())  # noqa: S301 - from the process that started this one
    sys.path[:] = sent["path"]
    main.__file__ = sent["main"]
    fn, args, kwargs = pickle.loads(sent["call"])  # noqa: S301 - as above
    result = _pickled(fn(*args, **kwargs))
    _save(Path(os.environ[FOLDER]) / f"{os.environ['RANK']}.result", result)


def _pickled(result: object) -> bytes:
    import cloudpickle

    try:
        data: bytes = cloudpickle.dumps(result)
    except Exception as error:
        kind = type(result).__qualname__
        raise TypeError(f"the result must be picklable (type: {kind}): {error}") from error
    return data


RUNS: dict[str, Callable[[str], None]] = {
    "--script": _run_script,
    "--module": _run_module,
    "--call": _run_call,
}


def _put_on_path(folder: str) -> None:
    """Look for modules in ``folder`` first, instead of the folder of this file."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _new_main() -> ModuleType:
    """A fresh ``__main__`` for the program, which stays in place while threads and exit handlers run."""
    module = ModuleType("__main__")
    module.__dict__["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = module
    # The name under which multiprocessing's children know the main module.
    if "__mp_main__" in sys.modules:
        sys.modules["__mp_main__"] = module
    return module


def _exit_on_sigterm() -> None:
    """Turn SIGTERM into SystemExit, so that exit handlers run; exit by force if that does not happen."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, _handle_sigterm)
    signal.signal(signal.SIGURG, _do_nothing)
    sys.unraisablehook = _without_sigterm(sys.unraisablehook)
    os.register_at_fork(
        before=_block_sigterm, after_in_parent=_unblock_sigterm, after_in_child=_restore_sigterm_in_child
    )
    threading.Thread(target=_exit_by_force, args=(reader,), name="paceline-sigterm", daemon=True).start()


def _die_with_parent() -> None:
    """Get a SIGTERM when the process that started this one dies."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _handle_sigterm(_signum: int, frame: FrameType | None) -> None:
    if _is_in_import(frame):
        _may_be_dropped.set()
    _sigterm_handled.set()
    raise SystemExit(EXIT_SIGTERM)


def _is_in_import(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename != _IMPORT_FILE:
        frame = frame.f_back
    return frame is not None


def _wait_for_torchs_threads() -> None:
    """Let torch's threads end what they do, see Note [Works that gloo drops] in native_threads.py.

    By its path, because the import of paceline takes time, and a script need not have imported it.
    """
    if "torch" in sys.modules:
        runpy.run_path(str(_NATIVE_THREADS))["wait_until_asleep"]()


def _do_nothing(signum: int, frame: FrameType | None) -> None:
    """A handler for a signal that only wakes a thread."""


def _without_sigterm(hook: Callable[["sys.UnraisableHookArgs"], Any]) -> Callable[[Any], Any]:
    """Say nothing of a SIGTERM that Python drops: it comes again, or has ended an exit handler."""

    def show(unraisable: "sys.UnraisableHookArgs") -> None:
        if _is_sigterm(unraisable.exc_value):
            _may_be_dropped.set()
        else:
            hook(unraisable)

    return show


def _block_sigterm() -> None:
    """Block SIGTERM while a child has our wakeup pipe: its SIGTERM must not look like ours."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _unblock_sigterm() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _restore_sigterm_in_child() -> None:
    """In a process that the script forks, SIGTERM has its default effect."""
    if signal.getsignal(signal.SIGTERM) is _handle_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
    _unblock_sigterm()


# Note [Dropped exits]. The SystemExit of a SIGTERM can be lost before it has ended the program. What a
# library runs while it is imported may catch every exception, also in C code, as in numpy. Python drops what
# is raised in a __del__. The program would go on, and the launcher would wait for it. So in these two cases a
# thread looks whether the main thread still handles the exit. If not, it is raised again, and at last the
# process exits by force. A program that handles it, and for example saves in a ``finally``, is not disturbed.
# Nor is one that catches it outside of imports: it may have something to save.


def _exit_by_force(reader: int) -> None:
    """Wake the main thread after a signal; exit if it is busy outside of Python and cannot run the handler.

    Handlers run in the main thread. But another thread may take the signal, as happens when a stopped process
    is continued, or it comes when the main thread is about to sleep. Then the main thread would sleep on.
    """
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    left = MOST_RAISED_AGAIN
    while True:
        if select.select([reader], [], [], LOOK_SECONDS if _sigterm_handled.is_set() else None)[0]:
            _wake(main_thread, signum=os.read(reader, 1)[0])
        elif _is_exit_dropped(main_thread):
            if not left:
                os._exit(EXIT_SIGTERM)
            left -= 1
            _sigterm_handled.clear()
            signal.pthread_kill(main_thread, signal.SIGTERM)


def _wake(main_thread: int, signum: int) -> None:
    if signum not in (signal.SIGINT, signal.SIGTERM):
        return
    for seconds in WAKE_AFTER_SECONDS:
        if _sigterm_handled.wait(seconds):
            break
        signal.pthread_kill(main_thread, signal.SIGURG)
    is_ours = signum == signal.SIGTERM and signal.getsignal(signal.SIGTERM) is _handle_sigterm
    if is_ours and not _sigterm_handled.is_set():
        os._exit(EXIT_SIGTERM)


def _is_exit_dropped(main_thread: int) -> bool:
    """Whether the program goes on after a SIGTERM, see Note [Dropped exits]."""
    is_ours = signal.getsignal(signal.SIGTERM) is _handle_sigterm
    if _program_ended.is_set() or not (_may_be_dropped.is_set() and is_ours):
        return False
    handled: Any = sys._current_exceptions().get(main_thread)
    error = handled[1] if isinstance(handled, tuple) else handled  # a tuple in Python 3.11
    while error is not None and not _is_sigterm(error):
        error = error.__context__
    return error is None


def _is_sigterm(error: BaseException | None) -> bool:
    return isinstance(error, SystemExit) and error.code == EXIT_SIGTERM


def _report_crashes() -> None:
    """Write a traceback to a file when a signal such as SIGSEGV kills the interpreter."""
    if folder := os.environ.get(FOLDER):
        file = (Path(folder) / f"{os.environ['RANK']}.crash").open("w")
        faulthandler.enable(file, all_threads=False)


def _keep_temporary_files() -> None:
    """Have multiprocessing's files in the run's folder, which is deleted also if this process is killed."""
    if folder := os.environ.get(FOLDER):
        config = multiprocessing.current_process()._config  # type: ignore[attr-defined]  # where it looks first
        config["tempdir"] = tempfile.mkdtemp(prefix="pymp-", dir=folder)


def _show(error: BaseException) -> None:
    """Leave the traceback to the launcher, and call the program's own excepthook if it has one."""
    is_reported = _write_report(error)
    # torch installs an excepthook that prints the traceback with the rank; the launcher does that.
    is_programs = sys.excepthook is not sys.__excepthook__ and not _is_torchs(sys.excepthook)
    if is_programs or not is_reported:
        trace = _program_traceback(error)
        sys.excepthook(type(error), error.with_traceback(trace), trace)  # Python's own shows the error's


def _is_torchs(hook: object) -> bool:
    return getattr(hook, "__module__", "").partition(".")[0] == "torch"


def _write_report(error: BaseException) -> bool:
    """Write the error report where the launcher looks for it; whether that worked.

    The error of a forked child is not the rank's: the rank may go on, or end in another way.
    """
    folder, rank = os.environ.get(FOLDER), os.environ.get("RANK")
    if folder is None or rank is None or os.getpid() != _rank_pid:
        return False
    try:
        _save(Path(folder) / f"{rank}.json", json.dumps(error_report(error)).encode())
    except OSError:
        return False
    return True


def error_report(error: BaseException) -> dict[str, Any]:
    """When and where ``error`` was raised, its traceback, and the first errors of its chain of causes."""
    text = "".join(traceback.format_exception(type(error), error, _program_traceback(error)))
    return {
        "time": time.time(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        # A signal may still kill the process before it has exited with this.
        "code": exit_code(error),
        "kind": type(error).__qualname__,
        "message": _message(error),
        "trace": text[-LONGEST_MESSAGE:],
        "origins": [{"types": _types(origin), "message": _message(origin)} for origin in _origins(error)],
    }


def exit_code(error: BaseException) -> int:
    """The exit code that Python gives for this exception, as a shell shows it."""
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code & 0xFF
    return EXIT_SIGINT if isinstance(error, KeyboardInterrupt) else 1


def _message(error: BaseException) -> str:
    try:
        return str(error)[:LONGEST_MESSAGE]
    except Exception:
        return "(its message cannot be shown)"


def _types(error: BaseException) -> list[str]:
    return [f"{base.__module__}.{base.__qualname__}" for base in type(error).__mro__]


def _origins(error: BaseException) -> Iterator[BaseException]:
    """The first errors of the chain of causes and contexts; an exception group has several."""
    seen = {id(error)}
    while (earlier := _earlier(error)) is not None and id(earlier) not in seen:
        seen.add(id(earlier))
        error = earlier
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _origins(inner)
    else:
        yield error


def _earlier(error: BaseException) -> BaseException | None:
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _program_traceback(error: BaseException) -> TracebackType | None:
    """The traceback without the frames above the program's own."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in LAUNCHER_FILES:
        trace = trace.tb_next
    return trace


def _save(path: Path, data: bytes) -> None:
    """Write a file that appears only when it is complete."""
    draft = path.with_suffix(path.suffix + ".draft")
    draft.write_bytes(data)
    draft.replace(path)


if __name__ == "__main__":
    main()
