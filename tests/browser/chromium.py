"""The browser of this machine."""

import os
import shutil

import pytest

BROWSERS = (
    "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "microsoft-edge",
)  # fmt: skip


def find_browser() -> str:
    """Its path; the test is skipped where there is none."""
    wanted = os.environ.get("MEMPLAN_BROWSER")
    found = wanted or next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium or Chrome on this machine (MEMPLAN_BROWSER names one)")
    return found
