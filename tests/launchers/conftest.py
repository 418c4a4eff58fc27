from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from mpi_wheels import MissingLauncherError
from slurm_cluster import slurm_cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """The variables by which srun and sbatch find a cluster of two nodes."""
    with ExitStack() as stack:
        try:
            variables = stack.enter_context(slurm_cluster())
        except MissingLauncherError as reason:
            pytest.skip(str(reason))
        yield variables
