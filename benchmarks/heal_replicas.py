"""Starts the replicas of a training with torchft, and starts each one again that is killed.

python benchmarks/heal_replicas.py REPLICAS SCRIPT [ARGUMENT ...]

It ends with 0 once all replicas have, and with a replica's exit code if one fails by itself.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torchft.coordination import LighthouseServer  # type: ignore[import-untyped]  # ships no types

_POLL_SECONDS = 0.02


@dataclass
class Replica:
    """A replica's process, and the store that its manager needs."""

    store: Any
    process: subprocess.Popen[bytes]


def start(number: int, replicas: int, command: Sequence[str], lighthouse: str) -> Replica:
    store = dist.TCPStore(  # type: ignore[attr-defined]  # in no __all__ of torch
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    variables = {
        "REPLICA_GROUP_ID": str(number),
        "NUM_REPLICA_GROUPS": str(replicas),
        "TORCHFT_LIGHTHOUSE": lighthouse,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "RANK": "0",
        "WORLD_SIZE": "1",
    }
    process = subprocess.Popen([sys.executable, *command], env={**os.environ, **variables})  # noqa: S603  # ours
    return Replica(store, process)


def keep_alive(replicas: list[Replica], command: Sequence[str], lighthouse: str) -> int:
    """Start killed replicas again until all have ended, or one has failed; returns the exit code."""
    while True:
        codes = [each.process.poll() for each in replicas]
        if failed := [code for code in codes if code not in (None, 0, -signal.SIGKILL)]:
            return abs(failed[0] or 1)
        for number, code in enumerate(codes):
            if code == -signal.SIGKILL:
                replicas[number] = start(number, len(replicas), command, lighthouse)
        if all(code == 0 for code in codes):
            return 0
        time.sleep(_POLL_SECONDS)


def main() -> None:
    count, command = int(sys.argv[1]), sys.argv[2:]
    server = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=1000)
    replicas = [start(number, count, command, server.address()) for number in range(count)]
    try:
        code = keep_alive(replicas, command, server.address())
    finally:
        for each in replicas:
            each.process.kill()
            each.process.wait()
        server.shutdown()
    sys.exit(code)


if __name__ == "__main__":
    main()
