"""What pyproject.toml cannot say: the compiled core, and when it is left out.

Where it cannot be compiled memplan is installed without it and answers the same, more slowly.
``MEMPLAN_PURE_PYTHON=1`` leaves it out on purpose: that wheel is for every machine.
"""

import os
import sysconfig

from setuptools import Extension, setup

STABLE_ABI = "cp311"
"""The oldest Python that the module is for; ``Py_LIMITED_API`` in the source says the same."""


def is_compiled() -> bool:
    """Whether to try: free-threaded Pythons have no stable ABI."""
    wanted = not os.environ.get("MEMPLAN_PURE_PYTHON")
    return wanted and not sysconfig.get_config_var("Py_GIL_DISABLED")


if is_compiled():
    replay = Extension(
        "memplan.memory._replay",
        ["memplan/memory/_replay.c"],
        py_limited_api=True,
        optional=True,
    )
    setup(ext_modules=[replay], options={"bdist_wheel": {"py_limited_api": STABLE_ABI}})
else:
    setup()
