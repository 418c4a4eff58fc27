"""The command ``paceline``."""

import click

import paceline
from paceline.cli.report import report
from paceline.cli.run import run


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(paceline.__version__, prog_name="paceline")
def main() -> None:
    """Train PyTorch models on several ranks, and see where the time goes."""


main.add_command(run)
main.add_command(report)
