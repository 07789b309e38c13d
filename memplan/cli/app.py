"""The ``memplan`` command itself: runs the command asked for, reports what went wrong."""

import os
import sys
from collections.abc import Sequence

from memplan.cli import INTERRUPTED
from memplan.cli.commands import COMMANDS, COMPLETION_VARIABLE
from memplan.cli.output import terminal
from memplan.cli.output.terminal import abandon, fail, prepare_streams, say
from memplan.errors import ExitCode, MemplanError

PIPE_CLOSED = 141
"""Exit code when the reader went away (``memplan models | head -1``): 128 + SIGPIPE."""
_FOR_HELP = ("--help",), ("-h",), ("help",)


def run(arguments: Sequence[str]) -> int:
    """Run ``memplan`` with these arguments and return the exit code.

    An error that memplan raises on purpose, or a mistake on the command line, is one line on
    stderr. Anything else is a bug: it goes through, with its traceback.
    """
    prepare_streams()
    before, terminal.answers_command = terminal.answers_command, True
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        return _stop_writing()
    except SystemExit as stop:
        # rich answers a closed pipe with its own exit; what it was answering is still attached.
        if isinstance(stop.__context__, BrokenPipeError):
            return _stop_writing()
        raise
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        # No file is named: it is stdout itself, on a full disk or a device that is gone.
        abandon(sys.stdout)
        return fail(f"cannot write the answer to stdout: {error.strerror}", code=ExitCode.INPUT)
    finally:
        terminal.answers_command = before
    return code


def _run(arguments: Sequence[str]) -> int:
    """What is typed as it should be is read without Typer; all else is Typer's, which says what is wrong with it."""
    try:
        if COMPLETION_VARIABLE not in os.environ:
            if not arguments or tuple(arguments) in _FOR_HELP:
                from memplan.cli import top_help  # no command needs it

                say(top_help.page())
                return ExitCode.OK
            if arguments[0] in COMMANDS:
                from memplan.cli import plain  # of `memplan --help` nothing of it is asked

                read = plain.read(arguments)
                if read is not None:
                    return read.run()
        from memplan.cli.with_typer.app import answer

        return answer(arguments)
    except MemplanError as error:
        return fail(_own_message(error, arguments), code=error.exit_code)
    except KeyboardInterrupt:
        return INTERRUPTED


def _own_message(error: MemplanError, arguments: Sequence[str]) -> str:
    """What the library says, which knows of fields, in terms of options."""
    if not arguments or arguments[0] not in COMMANDS:
        return str(error)
    from memplan.cli.with_typer.app import load_command
    from memplan.cli.wording import in_options, option_names

    return in_options(str(error), option_names(load_command(arguments[0])), arguments[1:])


def _stop_writing() -> int:
    """Keep quiet from here on: whoever was reading has seen enough."""
    abandon(sys.stdout)
    return PIPE_CLOSED
