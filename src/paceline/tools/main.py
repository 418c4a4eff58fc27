"""The command ``paceline``."""

import click

import paceline
from paceline.tools.audit.command import audit
from paceline.tools.bench.command import bench
from paceline.tools.doctor.command import doctor
from paceline.tools.plan.command import plan
from paceline.tools.report.command import report
from paceline.tools.run.command import run


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(paceline.__version__, prog_name="paceline")
def main() -> None:
    """Train PyTorch models on several ranks, and see where the time goes."""


for command in (run, report, plan, doctor, bench, audit):
    main.add_command(command)
