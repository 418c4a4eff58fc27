"""An outer loop among hosts whose ranks are killed and replaced."""

from pathlib import Path

from launcher_runs import free_port
from running import Ran, in_rank, script

from paceline.testing import run_ranks

TRAINS = """
import hashlib, os, signal, sys, time
from pathlib import Path
import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset
import paceline

host, meet = int(sys.argv[1]), sys.argv[2]
# Who is killed in which step: the rank that listens where hosts meet, the one that talks to it, and another.
KILLED = {15: (0, 0), 22: (1, 0), 29: (1, 1)}
listens = Path("../listens")
me = paceline.init()
torch.manual_seed(0)
ddp = paceline.DistributedDataParallel(nn.Linear(4, 2), shards=4)
outer = paceline.OuterLoop(ddp, meet=meet, period=4, grace=2.0)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
data = TensorDataset(torch.randn(320, 4, generator=torch.Generator().manual_seed(host)))
loader = DataLoader(data, batch_sampler=paceline.ShardedBatchSampler(data, shards=4, batch_size=8))
run = paceline.Run(ddp, optimizer, loader)
done = 0
while host == 1 and not listens.exists():
    time.sleep(0.01)
for step in run:
    with step:
        outer.step()
        if host == 0:
            listens.touch()
        while step.number >= 5 and distributed.get_rank() == 0 and not outer.hosts:
            time.sleep(0.01)  # the other host is not here
        for (x,) in step.shards():
            ddp(x).square().mean().backward()
        if KILLED.get(step.number) == (host, me.rank) and done:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        done += 1
hosts = outer.hosts
outer.finish()
values = torch.cat([each.detach().view(-1) for each in ddp.module.parameters()])
assert values.isfinite().all()
print(f"{run.steps} steps, with {hosts}, {hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16]}")
distributed.destroy_process_group()
"""
TIMEOUT = 90.0


def launcher_of_host(host: int, folder: Path, meet: str) -> Ran:
    own = folder / str(host)
    own.mkdir()
    script(own, TRAINS)
    return in_rank(host, ["run", "--heal", "-n", "2", "script.py", str(host), meet], own)


def test_killed_ranks_are_replaced_and_both_hosts_end_with_one_model(tmp_path: Path) -> None:
    args = (tmp_path, f"127.0.0.1:{free_port()}")
    hosts = run_ranks(launcher_of_host, 2, args=args, backend=None, timeout=TIMEOUT)
    said = set()
    for ran, lost in zip(hosts, (1, 2), strict=True):
        assert isinstance(ran, Ran)
        assert ran.code == 0, ran.stderr
        assert ran.stderr.count("was lost (SIGKILL)") == lost
        assert "away" not in ran.stderr
        said |= {line.partition("] ")[2] for line in ran.lines}
    [model] = {line.rpartition(" ")[2] for line in said}
    assert said == {f"40 steps, with {others}, {model}" for others in ([], [0], [1])}
