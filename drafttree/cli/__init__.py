"""The `drafttree` command, with one module per subcommand."""

from typing import Annotated

import typer

from drafttree import __version__
from drafttree.cli.bench import bench
from drafttree.cli.budget import budget
from drafttree.cli.demo import demo
from drafttree.cli.doctor import doctor
from drafttree.cli.model import model
from drafttree.cli.prepare import prepare
from drafttree.cli.quantize import quantize
from drafttree.cli.report import report
from drafttree.cli.trace import trace
from drafttree.cli.train import train
from drafttree.cli.tree import tree


def print_version(asked: bool) -> None:
    """Print the version and end, if asked."""
    if asked:
        typer.echo(f"drafttree {__version__}")
        raise typer.Exit


app = typer.Typer(
    name="drafttree",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Draft trees for vLLM and SGLang."""


app.command()(model)
app.command()(doctor)
app.command()(prepare)
app.command()(quantize)
app.command()(bench)
app.command()(demo)
app.command()(tree)
app.command()(trace)
app.command()(report)
app.command()(budget)
app.add_typer(train, name="train")
