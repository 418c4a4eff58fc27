"""Two hosts with two ranks each, on one machine, and the bytes that they send to each other.

sudo $(which python) examples/two_hosts.py

Each host is a network namespace, in which ``paceline run`` is started. The two commands differ only in the
host's number and address. They are printed, and are all that you need on real hosts. The ranks train a
network with torch's wrapper and with paceline's, and count how many bytes their host sends per step. Needs
root, to make the namespaces.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline.testing.hosts import Hosts, sent_bytes, why_not

STEPS = 4
SECONDS = 60.0  # a host that takes longer hangs
OPTIONS = "-n 2 --nnodes 2 --node-rank {number} --rdzv-endpoint {meet}:29500 --local-addr {here}"


def start(hosts: Hosts, number: int) -> subprocess.Popen[bytes]:
    """Start the ranks of one host, inside its namespace."""
    options = OPTIONS.format(number=number, meet=hosts.addresses[0], here=hosts.addresses[number])
    command = ["paceline", "run", *options.split(), sys.argv[0]]
    print(f"on host {number}:", *command, flush=True)
    command[0] = str(Path(sys.executable).with_name("paceline"))
    variables = {
        "GLOO_SOCKET_IFNAME": "wire",
        "PACELINE_HOST_ID": hosts.names[number],  # otherwise all ranks of this machine would share memory
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # otherwise torch warns that it finds no name server
    }
    inside = ["ip", "netns", "exec", hosts.names[number]]
    return subprocess.Popen([*inside, *command], env=os.environ | variables)  # noqa: S603 - the example's own


def launch() -> int:
    with Hosts() as hosts:
        commands = [start(hosts, number) for number in range(2)]
        try:
            return max(abs(command.wait(SECONDS)) for command in commands)
        finally:
            for command in commands:
                command.terminate()  # no effect on a command that has ended


def sent_a_step(wrap: Callable[[nn.Module], nn.Module]) -> float:
    """The number of bytes that this rank's host sends per step."""
    torch.manual_seed(0)
    model = wrap(nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(8, 512)
    before = 0
    for step in range(-2, STEPS):  # two steps to warm up
        if step == 0:
            dist.barrier()
            before = sent_bytes()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    dist.barrier()
    return (sent_bytes() - before) / STEPS


def train() -> None:
    """Runs on each rank."""
    dist.init_process_group("gloo")
    theirs = sent_a_step(torch.nn.parallel.DistributedDataParallel)
    ours = sent_a_step(paceline.DistributedDataParallel)
    if dist.get_rank() % 2 == 0:
        print(f"a step sends {theirs / 1e6:.2f} MB with torch's wrapper, {ours / 1e6:.2f} MB with paceline's")
        print(f"that is {ours / theirs:.2f} of it")
    dist.destroy_process_group()


def main() -> None:
    if dist.is_torchelastic_launched():
        train()
    elif (reason := why_not()) is not None:
        sys.exit(f"two hosts cannot be made here: {reason}")
    else:
        sys.exit(launch())


if __name__ == "__main__":
    main()
