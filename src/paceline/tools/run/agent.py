"""Runs a job's ranks on torch's elastic agent, which does rendezvous, several hosts and restarts."""

import logging
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self, TextIO

from torch.distributed.elastic import events
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events.api import Event
from torch.distributed.elastic.multiprocessing import SignalException, Std
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters, registry
from torch.distributed.launcher.api import LaunchConfig

from paceline.recording.recorder import FOLDER_VARIABLE
from paceline.tools.run.console import Destination, StatusLine
from paceline.tools.run.failures import FailureSummary, RankFailure
from paceline.tools.run.healer import Healer
from paceline.tools.run.one_host import OneHostRendezvous, one_host_port
from paceline.tools.run.progress import read_progress, read_whole
from paceline.tools.run.rank_output import OutputThread, RankLogs
from paceline.tools.run.rank_processes import RankProcesses, child_subreaper
from paceline.tools.run.rank_stores import RankStores
from paceline.tools.run.run_watch import Watch
from paceline.tools.run.stalls import find_stall
from paceline.tools.run.worker import FOLDER

# How long ranks may take to end after another rank has failed, and after a signal or before a restart.
SECONDS_AFTER_FAILURE, SECONDS_AFTER_SIGNAL = 2, 30
# For how many seconds others may wait for a rank of a run that is healed.
DEFAULT_LOST_AFTER = 30.0
# Loggers of torch's agent that report failed ranks, which we report ourselves.
FAILURE_LOGGERS = ("multiprocessing.api", "agent.server.api", "agent.server.local_elastic_agent")


@dataclass(frozen=True)
class Job:
    """What every rank of this host runs, and where its output goes.

    Attributes:
        config: torch's launch configuration.
        command: the command line of each rank.
        log_dir: the folder for log files.
        environment: variables that each rank gets.
        only_logged: streams that are logged and not shown.
        shown_ranks: local ranks whose output is shown; None for all.
        shutdown_seconds: how long ranks may take to end, whatever the reason; None for what this file says.
        owns_all_children: whether all children of this process are ranks or were started by ranks.
        stall_seconds: how long a rank may be stalled before the run is ended; None if it is never ended.
        spares: how many processes are kept ready to replace lost ranks; None if a lost rank ends the run.
        lost_after: for how many seconds others may wait for a rank before it counts as lost.
    """

    config: LaunchConfig
    command: tuple[str, ...]
    log_dir: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    only_logged: Std | dict[int, Std] = Std.NONE
    shown_ranks: set[int] | None = None
    shutdown_seconds: int | None = None
    owns_all_children: bool = False
    stall_seconds: float | None = None
    spares: int | None = None
    lost_after: float = DEFAULT_LOST_AFTER


@dataclass(frozen=True)
class JobResult:
    """How a job ended: the failed ranks, the signal that stopped it, or the agent's own error, if any."""

    failures: list[RankFailure]
    summary: FailureSummary | None
    signal: signal.Signals | None
    error: Exception | None


def shutdown_seconds(given: int | None = None) -> int | None:
    """How long ranks may take to end: what is given, or what torch's variable says; None if neither is."""
    variable = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    return int(variable) if given is None and variable is not None else given


def available_cores() -> int:
    """How many CPU cores this process may use."""
    return len(os.sched_getaffinity(0))


def rank_environment(ranks: int) -> dict[str, str]:
    """The variables that each of this host's ranks gets; the cores are divided among them."""
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, available_cores() // ranks)))
    return {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": threads}


def run(job: Job, folder: Path, *, stdout: TextIO, stderr: TextIO) -> JobResult:
    """Run the job to its end, and leave none of its processes running. ``folder`` is for what ranks write."""
    destinations = (Destination(stdout), Destination(stderr))
    record = _record_folder(job, folder)
    status = StatusLine(
        destinations[1],
        lambda: read_progress(record),
        lambda: shutil.get_terminal_size().columns,
        lambda: find_stall(record),
        lambda: read_whole(record),
    )
    output = OutputThread(status)
    logs = RankLogs(
        folder,
        output,
        destinations,
        log_dir=job.log_dir,
        environment={**job.environment, FOLDER_VARIABLE: str(record)},
        only_logged=job.only_logged,
        shown_ranks=job.shown_ranks,
    )
    processes = RankProcesses(output, lambda: logs.folder, owns_all_children=job.owns_all_children)
    signals = SignalHandlers(job.config.signals_to_handle.split(","), lambda: processes.stop(at_once=True))

    def say(text: str) -> None:
        output.say(destinations[1], f"paceline: {text}")

    watch = Watch(processes.running, say, lambda: find_stall(record), stall_seconds=job.stall_seconds)
    healer = None
    if job.spares is not None:
        healer = Healer(
            job.command,
            lambda: logs.common_environment,
            processes,
            say,
            lambda: find_stall(record),
            spares=job.spares,
            lost_after=job.lost_after,
        )
    error = received = None
    with signals, child_subreaper(), _silent_failure_loggers():
        try:
            try:
                _run_agent(Agent(job, logs, processes, signals, say, watch, healer))
            finally:
                signals.stop_raising()
                received = signals.received  # the ranks have ended: a later signal does not change how
                if healer is not None:
                    healer.stop()
        except SignalException:
            pass
        except Exception as raised:
            error = raised
        processes.stop()
        output.finish()
    summary = processes.summary(is_one_host=_is_one_host(job))
    return JobResult(processes.failures(), summary, received, error)


def _is_one_host(job: Job) -> bool:
    return job.config.max_nodes == 1


def _record_folder(job: Job, otherwise: Path) -> Path:
    """Where ranks record their steps."""
    asked = job.environment.get(FOLDER_VARIABLE)
    if asked is None and FOLDER not in os.environ:  # in a rank of another run, the variable is that run's
        asked = os.environ.get(FOLDER_VARIABLE)
    return Path(asked).absolute() if asked else otherwise / "record"


def _run_agent(agent: "Agent") -> None:
    """Run ranks, and tell other hosts when all is over; after a signal, this host may come back."""
    try:
        agent.run()
    except SignalException:
        agent.record_event(agent.get_event_failed())
        raise
    except BaseException:
        agent.record_event(agent.get_event_failed())
        agent.leave_rendezvous()
        raise
    agent.record_event(agent.get_event_succeeded())
    agent.leave_rendezvous()


@contextmanager
def _silent_failure_loggers() -> Iterator[None]:
    """Turn off what the agent logs about failed ranks, unless LOGLEVEL asks for its log."""
    loggers = [logging.getLogger(f"torch.distributed.elastic.{name}") for name in FAILURE_LOGGERS]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = logger.disabled or "LOGLEVEL" not in os.environ
    try:
        yield
    finally:
        for logger, was_disabled in zip(loggers, before, strict=True):
            logger.disabled = was_disabled


class SignalHandlers:
    """While entered: the first signal raises what torch's agent expects, a second one calls ``stop_now``.

    Handlers can only be set in the main thread; in other threads signals keep their effect.
    """

    def __init__(self, names: Sequence[str], stop_now: Callable[[], None]) -> None:
        self.received: signal.Signals | None = None
        self._handled = [signal.Signals[name.strip()] for name in names if name.strip()]
        self._stop_now = stop_now
        self._before: dict[signal.Signals, Any] = {}
        self._may_raise = True

    def __enter__(self) -> Self:
        self._before = self._install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def reinstall(self) -> None:
        """Set the handlers again, after torch's agent has set its own."""
        self._install()

    def stop_raising(self) -> None:
        """Only note signals from now on: an exception would interrupt the code that stops the ranks."""
        self._may_raise = False

    def _install(self) -> dict[signal.Signals, Any]:
        if threading.current_thread() is not threading.main_thread():
            return {}
        return {signum: signal.signal(signum, self._handler(signum)) for signum in self._handled}

    def _handler(self, signum: signal.Signals) -> Any:
        """Our handler, except for a SIGHUP that nohup has told this process to ignore."""
        before = self._before.get(signum, signal.getsignal(signum))
        return before if signum == signal.SIGHUP and before is signal.SIG_IGN else self._receive

    def _receive(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002 - a handler's arguments
        is_first, self.received = self.received is None, self.received or signal.Signals(signum)
        if not is_first:
            self._stop_now()
        elif self._may_raise:
            raise SignalException(f"received {self.received.name}", self.received)


class Agent(LocalElasticAgent):
    """torch's agent, which also tells us which processes it starts."""

    def __init__(
        self,
        job: Job,
        logs: RankLogs,
        processes: RankProcesses,
        signals: SignalHandlers,
        say: Callable[[str], None],
        watch: Watch,
        healer: Healer | None,
    ) -> None:
        config = job.config
        super().__init__(spec=_spec(job), logs_specs=logs, start_method=config.start_method)
        self._processes = processes
        self._signals = signals
        self._say = say
        self._is_one_host = _is_one_host(job)
        self._given_seconds = job.shutdown_seconds
        self._close_seconds = self._given_or(SECONDS_AFTER_FAILURE)
        self._watch = watch
        self._healer = healer
        self._event_log = config.event_log_handler

    def record_event(self, event: Event) -> None:
        """Pass an event of the agent itself to the handler that ``--event-log-handler`` names."""
        events.record(event, self._event_log)

    def leave_rendezvous(self) -> None:
        """Tell the other hosts' agents that this one is done."""
        self._rdzv_handler.shutdown()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids: dict[int, Any] = super()._start_workers(worker_group)
        context = self._pcontext
        assert isinstance(context, SubprocessContext)
        handlers = context.subprocess_handlers
        self._processes.started({w.global_rank: handlers[w.local_rank].proc for w in worker_group.workers})
        # The agent has just set its own handlers, which would raise again while ranks are being stopped.
        self._signals.reinstall()
        for handler in handlers.values():
            _continue_after(handler)
            # The agent keeps copies of the rank's ends of its pipes.
            for file in (handler._stdout, handler._stderr):
                if file is not None:
                    file.close()
        self._limit_close_time(context)
        if self._healer is not None:
            self._healer.start(context, worker_group)
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._healer is not None and not self._healer.look():
            return RunResult(state=WorkerState.HEALTHY)
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state is WorkerState.HEALTHY:
            self._watch.look()
        return result

    def _exit_barrier(self) -> None:
        if self._healer is None:
            super()._exit_barrier()  # type: ignore[no-untyped-call]
        else:
            self._healer.wait_for_hosts()

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self._stop_workers(worker_group)
        self._processes.stop()
        summary = self._processes.summary(is_one_host=self._is_one_host)
        # When hosts come or go, ranks are stopped though none has failed.
        if summary is not None and not summary.root_cause.was_stopped:
            self._say(f"{summary}\nstarting the ranks again (restarts left: {self._remaining_restarts})")
        super()._restart_workers(worker_group)

    def _shutdown(
        self,
        death_sig: signal.Signals = signal.SIGTERM,
        timeout: int | None = None,  # noqa: ARG002 - torch's; versions before 2.12 give none
    ) -> None:
        is_stalled = self._watch.stall is not None
        seconds = self._given_or(SECONDS_AFTER_FAILURE if is_stalled else SECONDS_AFTER_SIGNAL)
        if self._signals.received is not None:
            self._say(
                f"{self._signals.received.name}: waiting up to {seconds} s for the ranks to end; "
                "a second signal stops them at once"
            )
        before, self._close_seconds = self._close_seconds, seconds
        try:
            super()._shutdown(death_sig)
        finally:
            self._close_seconds = before

    def _given_or(self, seconds: int) -> int:
        return seconds if self._given_seconds is None else self._given_seconds

    def _limit_close_time(self, context: SubprocessContext) -> None:
        """Give ranks the time to end that they have here, whichever the agent would give them."""
        close = context.close

        def close_in_time(death_sig: signal.Signals | None = None, timeout: int = 30) -> None:  # noqa: ARG001
            self._processes.asked_to_stop()
            close(death_sig, self._close_seconds)

        context.close = close_in_time  # type: ignore[method-assign]


def _continue_after(handler: SubprocessHandler) -> None:
    """Continue a rank whenever a signal is sent to it: a stopped one would not get the signal."""
    close = handler.close

    def close_and_continue(death_sig: signal.Signals | None = None) -> None:
        close(death_sig)
        with suppress(ProcessLookupError):
            os.killpg(handler.proc.pid, signal.SIGCONT)

    handler.close = close_and_continue  # type: ignore[method-assign]


def _spec(job: Job) -> WorkerSpec:
    """The job as torch's agent wants it."""
    config = job.config
    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    program, *arguments = job.command
    return WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=program,
        args=tuple(arguments),
        rdzv_handler=_rendezvous(parameters),
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        local_addr=config.local_addr,
        event_log_handler=config.event_log_handler,
        numa_options=config.numa_options,
        virtual_local_rank=config.virtual_local_rank,
    )


def _rendezvous(parameters: RendezvousParameters) -> RendezvousHandler:
    """How hosts meet; each start of the ranks has a store of its own."""
    port = one_host_port(parameters)
    if port is not None:
        return OneHostRendezvous(parameters.run_id, port)
    handler = registry.get_rendezvous_handler(parameters)
    has_one_store = parameters.backend in ("c10d", "static") and handler.use_agent_store
    return RankStores(handler) if has_one_store else handler
