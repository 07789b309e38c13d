"""The command line: one file per command, each of which reads, calls the library and reports.

``main`` is the console script. Nothing is imported before it is called, and only the module of the
command that was asked for after that: start-up is most of what a user waits for.
"""


def main() -> int:
    """Run ``memplan`` on the process's arguments and return its exit code.

    The garbage collector is told to wait: importing makes some 10^5 objects that stay, and looking
    through them again and again is about 4 % of a short run.
    """
    import gc
    import sys

    gc.set_threshold(100_000)
    from memplan.cli.app import run

    return run(sys.argv[1:])
