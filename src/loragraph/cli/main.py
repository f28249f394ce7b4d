"""The command line, one file a command. Errors: one line, exit status 2 for the user's mistakes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated, Any

import typer

from loragraph.cli.combine import combine
from loragraph.cli.convert import convert_command
from loragraph.cli.doctor import doctor
from loragraph.cli.extract import extract
from loragraph.cli.flags import error_in_flags
from loragraph.cli.inspect import inspect
from loragraph.cli.merge import merge
from loragraph.cli.models import models
from loragraph.cli.plan import plan
from loragraph.cli.resize import resize
from loragraph.cli.run import run
from loragraph.cli.serve import serve
from loragraph.errors import BackendError, LoragraphError, OutputError

app = typer.Typer(
    help="Serve one GGUF base model and any number of LoRA adapters.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(run)
app.command()(serve)
app.command()(inspect)
app.command()(models)
app.command("convert")(convert_command)
app.command()(merge)
app.command()(combine)
app.command()(extract)
app.command()(resize)
app.command()(plan)
app.command()(doctor)

# Click's base of all usage errors; typer has a copy of click and does not export this class.
_ClickError: Any = typer.BadParameter.__mro__[2]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(metadata.version("loragraph"))
        raise typer.Exit


@app.callback()
def _commands(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Serve one GGUF base model and any number of LoRA adapters."""


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of the command `loragraph`; ends the process."""
    try:
        status = app(args, standalone_mode=False, prog_name="loragraph")
        sys.stdout.flush()
        sys.exit(status if isinstance(status, int) else 0)
    except LoragraphError as error:
        _complain(error_in_flags(error))
        sys.exit(1 if isinstance(error, BackendError | OutputError) else 2)
    except _ClickError as error:
        _complain_usage(error)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:
        # The reader is gone, which is no news for the user; typer, too, ends with 1 then.
        # Without this, Python's last flush of stdout would fail once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:  # as of a full disk behind stdout; files of ours raise LoragraphError
        _complain(f"failed to write: {error.strerror or error}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _complain(message: str) -> None:
    sys.stderr.write(f"loragraph: {' '.join(message.split())}\n")


def _complain_usage(error: Any) -> None:
    command = error.ctx.command_path if error.ctx is not None else "loragraph"
    if not error.format_message():
        return  # no arguments at all: the help has been shown
    _complain(f"{error.format_message()} (hint: {command} --help)")


if __name__ == "__main__":
    main()
