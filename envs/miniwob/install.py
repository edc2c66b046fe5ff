"""Installs a Chromium if this machine has none.

    python -m envs.miniwob.install

Does nothing if `find_chromium` finds one. Otherwise it tries Playwright's own build with the libraries that
the build needs; then, as root, Debian's package, or without root the build alone. `make` runs this before
anything opens a page.
"""

import os
import shutil
import sys

from envs import packages
from envs.miniwob.browser.chromium import find_chromium

PLAYWRIGHT = [[sys.executable, "-m", "playwright", "install", "--with-deps", "chromium"]]
# the libraries need root or sudo
ALONE = [[sys.executable, "-m", "playwright", "install", "chromium"]]
# libatomic1: Playwright's own driver needs it, and Debian's slim images lack it
APT = [
    ["apt-get", "update"],
    ["apt-get", "install", "-y", "chromium", "libatomic1"],
    ["apt-get", "install", "-y", "chromium-headless-shell"],  # lighter; not everywhere
]


def ways() -> list[list[list[str]]]:
    """The ways to a Chromium on this machine, the cheapest first; each is a list of commands to run."""
    if os.environ.get("MINIDPO_CHROMIUM"):  # the user named one: there is nothing to install
        return [[]]
    apt = os.geteuid() == 0 and shutil.which("apt-get")
    return [[], PLAYWRIGHT, APT] if apt else [[], PLAYWRIGHT, ALONE]


def main() -> int:
    """Try each way until there is a Chromium. Returns the exit code: 0, or 2 after one line on what to do."""
    return packages.install(ways(), find_chromium)


if __name__ == "__main__":
    sys.exit(main())
