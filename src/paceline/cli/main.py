"""The command ``paceline``."""

import click

import paceline
from paceline.cli.bench import bench
from paceline.cli.doctor import doctor
from paceline.cli.report import report
from paceline.cli.run import run


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(paceline.__version__, prog_name="paceline")
def main() -> None:
    """Train PyTorch models on several ranks, and see where the time goes."""


for command in (run, report, doctor, bench):
    main.add_command(command)
