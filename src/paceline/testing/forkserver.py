"""A process that has imported torch once, and forks ranks that need not import it again.

    caller --- requests ---> fork server --- fork ---> rank 0, rank 1, ...
      |                                                  |       |
      +--- calls and answers, see messages.py ------------+-------+

The server answers one request at a time, and reaps a rank only when asked to. So a rank's pid cannot
pass to another process while the caller still knows it.

Note [No process is left behind]
    The server watches its caller: when that ends, in whatever way, the server kills its ranks, removes
    its directory and ends. A rank dies with its server: the kernel sends it SIGKILL. Each rank leads a
    process group of its own, so that the processes it started end with it.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from contextlib import ExitStack, suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NoReturn

from paceline.testing.messages import RankFiles
from paceline.testing.rank_process import serve_calls
from paceline.torch_private import COMPILER

# Imports on which a rank would otherwise spend seconds; init_process_group imports the compiler.
PRELOADED = ("torch", "torch.distributed", COMPILER)
# A rank imports the module of its function, which in a test means these too: 0.1 s each time.
PRELOADED_IF_IN_USE = ("pytest", "hypothesis")

MESSAGE_BYTES = 65536
# How long the server may take to answer; its first answer waits for torch's import on a cold machine.
REPLY_SECONDS = 120.0
END_SECONDS = 10.0
STDOUT, STDERR = 1, 2
PR_SET_PDEATHSIG = 1


class ForkServer:
    """The caller's side: a running fork server that it owns."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        # Ranks' directories are made inside it.
        self.directory = Path(tempfile.mkdtemp(prefix="paceline-"))
        # Sequenced packets keep messages apart, so a request needs no length in front.
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests.settimeout(REPLY_SECONDS)
        with theirs:
            self._process = _start_program(theirs.fileno(), self.directory)
        atexit.register(self.close)
        try:
            self._reply()  # It is ready.
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The server's process."""
        return self._process.pid

    @property
    def is_usable(self) -> bool:
        """Whether the server runs, and was started by this process rather than before a fork of it."""
        return self._owner == os.getpid() and self._process.poll() is None

    def fork(self, files: RankFiles, rank: int, channel: socket.socket) -> int:
        """Start a rank that answers on ``channel`` and prints where the caller prints; returns its pid."""
        descriptors = [STDOUT, STDERR, channel.fileno()]
        pid: int = self._ask(["fork", str(files.directory), rank], descriptors)
        return pid

    def reap(self, pid: int) -> int:
        """The exit code of a rank that has ended; a negative one is a signal's number."""
        try:
            exit_code: int = self._ask(["reap", pid], [])
        except OSError:
            # The server is gone, and so is the rank: see Note [No process is left behind].
            return -signal.SIGKILL
        return exit_code

    def close(self) -> None:
        """End the server with its ranks and its directory; in a fork of the owner, do nothing."""
        if self._owner == os.getpid():
            atexit.unregister(self.close)
            with suppress(OSError):
                self._requests.shutdown(socket.SHUT_RDWR)
            self._requests.close()
            self._end_process()
            # Whoever of the two lives longer removes the directory.
            shutil.rmtree(self.directory, ignore_errors=True)

    def _end_process(self) -> None:
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:  # It may be stopped. Its ranks die with it all the same.
            self._process.kill()
            self._process.wait()

    def _ask(self, request: list[str | int], descriptors: list[int]) -> Any:
        with self._lock:
            try:
                socket.send_fds(self._requests, [json.dumps(request).encode()], descriptors)
                return self._reply()
            except BaseException:
                # An interrupted caller would take this request's reply for the next one's.
                self.close()
                raise

    def _reply(self) -> Any:
        reply = self._requests.recv(MESSAGE_BYTES)
        if not reply:
            raise ConnectionError(f"the fork server has died (exit code: {self._process.wait()})")
        return json.loads(reply)


# By owner, so that a fork of the owner starts a server of its own.
_servers: dict[int, ForkServer] = {}
_servers_lock = threading.Lock()


def current() -> ForkServer:
    """This process's fork server, started when it is first needed and kept until the process ends."""
    with _servers_lock:
        server = _servers.get(os.getpid())
        if server is None or not server.is_usable:
            if server is not None:
                server.close()
            server = _servers[os.getpid()] = ForkServer()
        return server


def _start_program(requests: int, directory: Path) -> subprocess.Popen[bytes]:
    preload = [*PRELOADED, *(name for name in PRELOADED_IF_IN_USE if name in sys.modules)]
    program = (
        f"import sys; sys.path[:] = {sys.path!r}; from paceline.testing.forkserver import serve; "
        f"serve({requests}, {str(directory)!r}, {preload!r})"
    )
    return subprocess.Popen(  # noqa: S603 - this interpreter runs our own program
        [sys.executable, "-c", program],
        pass_fds=[requests],
        stdin=subprocess.DEVNULL,
        # Importing numpy starts OpenBLAS's threads, and a process with threads cannot be forked safely.
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        # Ctrl-C is for the caller, which ends its ranks.
        start_new_session=True,
    )


def serve(requests: int, directory: str, preload: list[str]) -> None:
    """Be the fork server: answer the requests on this descriptor until the caller is gone."""
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        server = _Server(stack.enter_context(socket.socket(fileno=requests)))
        stack.callback(server.end_ranks)
        _preload(preload)
        server.reply("ready")
        server.run()


def _preload(names: list[str]) -> None:
    for name in names:
        importlib.import_module(name)
    # Modules stay for ever: a garbage collection in a rank need not walk them, nor copy their pages.
    gc.collect()
    gc.freeze()


class _Server:
    """The server's side."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._caller = os.pidfd_open(os.getppid())
        self._ranks: set[int] = set()

    def run(self) -> None:
        """Answer requests until the caller is gone."""
        while self._requests in wait([self._requests, self._caller]):
            request, descriptors, _, _ = socket.recv_fds(self._requests, MESSAGE_BYTES, 3)
            if not request:
                return
            match json.loads(request):
                case ["fork", str(directory), int(rank)]:
                    self.reply(self._fork(RankFiles(Path(directory)), rank, descriptors))
                case ["reap", int(pid)]:
                    self.reply(self._reap(pid))

    def reply(self, reply: str | int) -> None:
        """Answer the caller, which may be gone by now."""
        with suppress(BrokenPipeError):
            self._requests.send(json.dumps(reply).encode())

    def end_ranks(self) -> None:
        """Kill and reap every rank that is left."""
        for pid in self._ranks.copy():
            self._reap(pid)

    def _fork(self, files: RankFiles, rank: int, descriptors: list[int]) -> int:
        assert len(list(Path("/proc/self/task").iterdir())) == 1, "an import started a thread"
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_rank(files, rank, descriptors, server)
        os.setpgid(pid, pid)
        self._ranks.add(pid)
        for descriptor in descriptors:
            os.close(descriptor)
        return pid

    def _become_rank(self, files: RankFiles, rank: int, descriptors: list[int], server: int) -> NoReturn:
        """Be a rank, in the forked process; never return into the server's code."""
        exit_code = 1
        try:
            _die_with(server)
            os.close(self._caller)
            self._requests.close()
            serve_calls(rank, files, _take_over(descriptors))
            exit_code = 0
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(exit_code)

    def _reap(self, pid: int) -> int:
        os.kill(pid, signal.SIGKILL)
        with suppress(ProcessLookupError):  # The rank may have moved to another process group.
            os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        self._ranks.remove(pid)
        return os.waitstatus_to_exitcode(status)


def _die_with(server: int) -> None:
    """Have the kernel kill this process when the server ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:  # It ended before the kernel knew.
        os._exit(1)


def _take_over(descriptors: list[int]) -> socket.socket:
    """Print where the caller prints; returns the socket to the caller."""
    stdout, stderr, channel = descriptors
    for given, standard in ((stdout, STDOUT), (stderr, STDERR)):
        os.dup2(given, standard)
        os.close(given)
    return socket.socket(fileno=channel)
