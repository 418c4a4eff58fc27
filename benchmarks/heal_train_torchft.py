"""The training of the benchmark of healing with torchft, one process per replica; see heal.py.

heal_replicas.py starts it. A replica that comes back takes over the state of the others, which have gone on
without it. The batch of a step depends on the step alone, so only the part of a missing replica is lost.

The manager averages the gradients itself. With the wrapper of torchft 0.2.0, an assertion in its hook would
end all other replicas when a collective fails, and no state would be left.
"""

import os
from datetime import timedelta
from typing import Any

from heal_notes import Phase
from heal_training import (
    EPOCH_STEPS,
    batches,
    digests,
    network,
    optimizer_of,
    parse,
    prolong,
    train_on,
)
from torch import nn
from torchft import Manager, Optimizer  # type: ignore[import-untyped]  # ships no types
from torchft.process_group import ProcessGroupGloo  # type: ignore[import-untyped]  # as above

TIMEOUT = timedelta(seconds=30)


def average_gradients(net: nn.Module, manager: Manager) -> None:
    for work in [manager.allreduce(each.grad) for each in net.parameters()]:
        work.wait()


def main() -> None:
    replica, world = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])
    arguments, notes = parse(replica)
    net = network()
    inner, scheduler = optimizer_of(net)
    parts: dict[str, Any] = {"net": net, "optimizer": inner, "scheduler": scheduler}

    def load_parts(state: dict[str, Any]) -> None:
        for name, part in parts.items():
            part.load_state_dict(state[name])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load_parts,
        state_dict=lambda: {name: part.state_dict() for name, part in parts.items()},
        min_replica_size=1,
        replica_id=f"replica{replica}",
        timeout=TIMEOUT,
    )
    optimizer = Optimizer(manager, inner)
    prolong(net, inner, notes)
    while (step := manager.current_step()) < arguments.epochs * EPOCH_STEPS:
        _, batch = next(batches(step, arguments.epochs, replica, world, notes))
        optimizer.zero_grad()
        train_on(net, batch, notes)
        average_gradients(net, manager)
        notes.enter(Phase.BEFORE_OPTIMIZER)
        optimizer.step()
        if manager.current_step() > step:
            scheduler.step()
            notes.ended(manager.current_step() - 1, manager.num_participants())
        notes.enter(Phase.OUTSIDE)
    notes.result(digests(net, inner))
    manager.shutdown(wait=False)
    os._exit(0)  # torchft's threads may still wait for something


if __name__ == "__main__":
    main()
