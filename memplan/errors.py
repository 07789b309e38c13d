"""Every error a user can meet, and the exit code that the command line gives it.

::

    MemplanError(ValueError)
    ├── UsageError                  2  the command or the call is wrong
    │   └── InterpreterError        2  a Python on which lifetimes cannot be counted
    ├── InputError                  3  something that was read is wrong
    │   ├── ConfigError             3  a model's config: says the file and the key
    │   ├── UnsupportedFamilyError  3  a kind of model that memplan does not know
    │   ├── ModelNotFoundError      3  no such built-in model, file or folder
    │   ├── GpuNotFoundError        3  no such GPU in the catalog
    │   ├── SetupError              3  a training setup that cannot exist
    │   ├── TraceError              3  a module that cannot be written down
    │   └── UnsupportedOperationError  3  the tape lacks an operation the model needs
    ├── HubError(OSError)           4  the Hugging Face hub
    │   ├── HubGatedError           4  the model asks for an accepted licence
    │   ├── HubNotFoundError        4  no such repository, revision or config.json
    │   ├── HubOfflineError         4  the hub is switched off or cannot be reached
    │   └── HubRateLimitError       4  too many requests
    ├── CheckFailedError            5  a check that was asked for did not hold
    └── WorkerLostError             6  a process that did part of the work was ended from outside

Messages are one line and say what to do next. Anything else that escapes is a bug in memplan.
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """What the process returns."""

    OK = 0
    BUG = 1
    USAGE = 2
    INPUT = 3
    HUB = 4
    CHECK_FAILED = 5
    CUT_SHORT = 6


class MemplanError(ValueError):
    """Base of all errors that memplan raises on purpose."""

    exit_code = ExitCode.INPUT


class UsageError(MemplanError):
    """The command line, or a call's arguments, make no sense together."""

    exit_code = ExitCode.USAGE


class InterpreterError(UsageError):
    """The interpreter does not let values go as CPython does."""


class InputError(MemplanError):
    """Something that was read is wrong."""


class ConfigError(InputError):
    """A model's config or spec is wrong; the message names the file and the key."""


class UnsupportedFamilyError(InputError):
    """The config is of a kind of model that memplan does not know."""


class UnsupportedOperationError(InputError):
    """The tape lacks an operation that this model needs for its activations."""


class ModelNotFoundError(InputError, LookupError):
    """No built-in model, file or folder has this name."""


class GpuNotFoundError(InputError, LookupError):
    """No entry of the GPU catalog has this name."""


class SetupError(InputError):
    """A training setup whose settings contradict one another."""


class HubError(MemplanError, OSError):
    """The Hugging Face hub could not serve the config."""

    exit_code = ExitCode.HUB


class HubGatedError(HubError):
    """The model asks its users to accept a licence and to log in."""


class HubNotFoundError(HubError):
    """The hub has no such repository, revision or config.json."""


class HubOfflineError(HubError):
    """The hub is switched off by ``HF_HUB_OFFLINE`` or cannot be reached."""


class HubRateLimitError(HubError):
    """The hub refuses more requests for now."""


class TraceError(InputError):
    """A module that cannot be written down as a program."""


class CheckFailedError(MemplanError):
    """A check that was asked for (``--check``, ``--fail-on``, ``--baseline``) did not hold."""

    exit_code = ExitCode.CHECK_FAILED


class WorkerLostError(MemplanError):
    """A process that did part of the work was ended from outside: what follows it is missing."""

    exit_code = ExitCode.CUT_SHORT


SHORTEST_PART = 4
"""A name's beginning says which is meant when it is longer [characters]."""
MAX_NAME = 100
"""Characters of a name that is compared with known ones: what is longer is no slip of the keyboard."""


def nearest(name: str, known: "list[str] | tuple[str, ...]") -> str | None:
    """Return the known name most like ``name``, or None when nothing comes close.

    The only name that begins with it is what was meant, however much longer it is.

    >>> nearest("num_layer", ["num_layers", "hidden_size"])
    'num_layers'
    >>> nearest("--images", ["--image-size", "--images-per-sample"])
    '--images-per-sample'
    """
    import difflib

    if len(name) > MAX_NAME:
        return None
    begun = [each for each in known if len(name) > SHORTEST_PART and each.startswith(name.lower())]
    if len(begun) == 1:
        return begun[0]
    matches = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.6)
    return matches[0] if matches else None


def did_you_mean(name: str, known: "list[str] | tuple[str, ...]") -> str:
    """Return `` Did you mean 'x'?`` for the nearest known name, or nothing.

    >>> did_you_mean("num_layer", ["num_layers", "hidden_size"])
    " Did you mean 'num_layers'?"
    """
    guess = nearest(name, known)
    return f" Did you mean {guess!r}?" if guess else ""
