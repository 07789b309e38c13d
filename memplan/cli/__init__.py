"""The command line: one file per command, each of which reads, calls the library and reports.

``main`` is the console script. Nothing is imported before it is called, and only the module of the
command that was asked for after that: start-up is most of what a user waits for.
"""

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT, as shells report it."""

owns_process = False
"""Whether the process is memplan's own, which it may copy."""


def main() -> int:
    """Run ``memplan`` on the process's arguments and return its exit code."""
    global owns_process
    import gc
    import sys

    from memplan.search.patience import PATIENCE

    owns_process = True
    gc.set_threshold(PATIENCE)
    try:
        from memplan.cli.app import run

        return run(sys.argv[1:])
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        # The process ends, and its memory with it: Python need not look for cycles in it first, which
        # takes a sixth of a short run.
        gc.freeze()
