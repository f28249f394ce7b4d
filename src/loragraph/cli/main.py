"""The command line, one file a command. Errors: one line, exit status 2 for the user's mistakes."""

from __future__ import annotations

import os
import signal
import sys

import typer

from loragraph.cli.inspect import inspect
from loragraph.errors import LoragraphError

app = typer.Typer(
    help="Serve one GGUF base model and any number of LoRA adapters.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(inspect)


@app.callback()
def _commands() -> None:
    """Serve one GGUF base model and any number of LoRA adapters."""


def main() -> None:
    """Entry point of the command `loragraph`."""
    try:
        app()
    except LoragraphError as error:
        sys.stderr.write(f"loragraph: {' '.join(str(error).split())}\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:
        # The reader is gone. Without this, Python's last flush of stdout would fail once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + 13)


if __name__ == "__main__":
    main()
