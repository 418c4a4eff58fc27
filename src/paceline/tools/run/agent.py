"""Ranks on torch's elastic agent, which does rendezvous, several hosts and restarts."""

import logging
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from torch.distributed.elastic import events
from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events.api import Event
from torch.distributed.elastic.multiprocessing import SignalException, Std
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousParameters, registry
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig

from paceline.recording.recorder import FOLDER_VARIABLE
from paceline.tools.run.console import Sink
from paceline.tools.run.failures import Failure, verdict
from paceline.tools.run.output import Output
from paceline.tools.run.processes import orphans_adopted
from paceline.tools.run.progress import read_progress
from paceline.tools.run.ranks import Ranks, Streams
from paceline.tools.run.signals import Signals
from paceline.tools.run.status import Status
from paceline.tools.run.worker import FOLDER

# What ranks get to end when another one has failed. When a signal asked for it they get the agent's 30 s.
FAILED_SECONDS = 2
# Their words on ranks that fail or are ended, which are told here otherwise.
TALKERS = ("multiprocessing.api", "agent.server.api", "agent.server.local_elastic_agent")


@dataclass(frozen=True)
class Job:
    """What every rank of this host runs, and what is done with what it prints."""

    config: LaunchConfig
    command: tuple[str, ...]
    log_dir: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    only_logged: Std | dict[int, Std] = Std.NONE
    shown_ranks: set[int] | None = None
    failed_seconds: int = FAILED_SECONDS
    # Whether this process has no children but ranks and theirs.
    adopts_all: bool = False


@dataclass(frozen=True)
class Ending:
    """How a job ended: the failures of its ranks, or the signal that ended it, or the agent's own error."""

    failures: list[Failure]
    signal: signal.Signals | None
    error: Exception | None

    @property
    def is_good(self) -> bool:
        """Whether every rank has ended well."""
        return not self.failures and self.signal is None and self.error is None


def thread_budget(ranks: int) -> int:
    """How many threads each of the ranks of this host gets."""
    return max(1, cores() // ranks)


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0))


def environment(ranks: int) -> dict[str, str]:
    """What is in each rank's environment unless the caller has it in its own."""
    budget = os.environ.get("OMP_NUM_THREADS", str(thread_budget(ranks)))
    return {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": budget}


def run(job: Job, folder: Path, *, stdout: TextIO, stderr: TextIO) -> Ending:
    """Run the job to its end, and leave nothing of it running. ``folder`` is for what ranks tell."""
    sinks = (Sink(stdout), Sink(stderr))
    record = _record_folder(job, folder)
    output = Output(
        Status(sinks[1], lambda: read_progress(record), lambda: shutil.get_terminal_size().columns)
    )
    streams = Streams(
        folder,
        output,
        sinks,
        log_dir=job.log_dir,
        environment={**job.environment, FOLDER_VARIABLE: str(record)},
        only_logged=job.only_logged,
        shown_ranks=job.shown_ranks,
    )
    ranks = Ranks(output, lambda: streams.folder, adopts_all=job.adopts_all)
    signals = Signals(job.config.signals_to_handle.split(","), lambda: ranks.end(at_once=True))

    def say(text: str) -> None:
        output.say(sinks[1], f"paceline: {text}")

    error = None
    with signals, orphans_adopted(), _quiet():
        try:
            try:
                _run(Agent(job, streams, ranks, signals, say))
            finally:
                signals.hold()
        except SignalException:
            pass
        except Exception as raised:
            error = raised
        ranks.end()
        output.finish()
    return Ending(ranks.failures(), signals.received, error)


def _record_folder(job: Job, otherwise: Path) -> Path:
    """Where ranks record their steps."""
    asked = job.environment.get(FOLDER_VARIABLE)
    if asked is None and FOLDER not in os.environ:  # in a rank of another run, the variable is that run's
        asked = os.environ.get(FOLDER_VARIABLE)
    return Path(asked).absolute() if asked else otherwise / "record"


def _run(agent: "Agent") -> None:
    """Run ranks, and tell other hosts when all is over; after a signal, this host may come back."""
    try:
        agent.run()
    except SignalException:
        agent.tell(agent.get_event_failed())
        raise
    except BaseException:
        agent.tell(agent.get_event_failed())
        agent.leave()
        raise
    agent.tell(agent.get_event_succeeded())
    agent.leave()


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave what the agent logs of failed ranks out, unless its log is asked for."""
    loggers = [logging.getLogger(f"torch.distributed.elastic.{name}") for name in TALKERS]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = logger.disabled or "LOGLEVEL" not in os.environ
    try:
        yield
    finally:
        for logger, was_disabled in zip(loggers, before, strict=True):
            logger.disabled = was_disabled


class Agent(LocalElasticAgent):
    """torch's agent, with an eye on the processes that it starts. Tried with torch 2.13."""

    def __init__(
        self, job: Job, streams: Streams, ranks: Ranks, signals: Signals, say: Callable[[str], None]
    ) -> None:
        config = job.config
        assert config.shutdown_timeout is not None
        super().__init__(
            spec=_spec(job),
            logs_specs=streams,
            start_method=config.start_method,
            shutdown_timeout=config.shutdown_timeout,
        )
        self._ranks = ranks
        self._signals = signals
        self._say = say
        self._failed_seconds = job.failed_seconds
        self._event_log = config.event_log_handler

    def tell(self, event: Event) -> None:
        """Hand an event of the agent itself to whoever was named with ``--event-log-handler``."""
        events.record(event, self._event_log)

    def leave(self) -> None:
        """Tell the other hosts' agents that this one is done."""
        self._rdzv_handler.shutdown()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids: dict[int, Any] = super()._start_workers(worker_group)
        context = self._pcontext
        assert isinstance(context, SubprocessContext)
        handlers = context.subprocess_handlers
        self._ranks.started({w.global_rank: handlers[w.local_rank].proc for w in worker_group.workers})
        # The agent has put handlers of its own in place, which would raise again while ranks are being ended.
        self._signals.insist()
        for handler in handlers.values():
            # The rank's ends of its pipes, of which the agent keeps copies.
            for file in (handler._stdout, handler._stderr):
                if file is not None:
                    file.close()
        self._bound_the_end(context)
        return pids

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self._stop_workers(worker_group)
        self._ranks.end()
        told = verdict(self._ranks.failures())
        # Where hosts come or go, ranks are ended though none has failed.
        if told is not None and not told.first.was_ended:
            self._say(f"{told}\nstarting the ranks again (restarts left: {self._remaining_restarts})")
        super()._restart_workers(worker_group)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        if self._signals.received is not None:
            self._say(
                f"{self._signals.received.name}: the ranks are asked to end, and have {timeout} s for it; "
                "once more ends them at once"
            )
        super()._shutdown(death_sig, timeout)

    def _bound_the_end(self, context: SubprocessContext) -> None:
        """Have ranks that must end because one has failed do so soon; the agent would wait for 30 s."""
        close = context.close

        def close_soon(death_sig: signal.Signals | None = None, timeout: int | None = None) -> None:
            self._ranks.asked_to_end()
            close(death_sig, self._failed_seconds if timeout is None else timeout)

        context.close = close_soon  # type: ignore[method-assign]


def _spec(job: Job) -> WorkerSpec:
    """The job in the words of torch's agent."""
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
    address, port = _fixed_address(parameters)
    program, *arguments = job.command
    return WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=program,
        args=tuple(arguments),
        rdzv_handler=registry.get_rendezvous_handler(parameters),
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        master_addr=address,
        master_port=port,
        local_addr=config.local_addr,
        event_log_handler=config.event_log_handler,
        numa_options=config.numa_options,
        virtual_local_rank=config.virtual_local_rank,
    )


def _fixed_address(parameters: RendezvousParameters) -> tuple[str | None, int | None]:
    """Where ranks meet, if it was said; the agents find a place otherwise."""
    if parameters.backend != "static":
        return None, None
    return parse_rendezvous_endpoint(parameters.endpoint.strip(), default_port=-1)
