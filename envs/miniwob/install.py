"""Installs a Chromium if this machine has none.

    python -m envs.miniwob.install

Does nothing if `find_chromium` finds one. Otherwise it tries Playwright's build together with the libraries that it
needs; if that fails, Debian's package (as root) or the build alone (without root). `make` runs this before anything
opens a page.
"""

import os
import shutil
import sys

from envs import packages
from envs.miniwob.browser.chromium import find_chromium

PLAYWRIGHT = [[sys.executable, "-m", "playwright", "install", "--with-deps", "chromium"]]
# without the libraries, which need root or sudo
ALONE = [[sys.executable, "-m", "playwright", "install", "chromium"]]
# libatomic1: Playwright's own driver needs it, and Debian's slim images lack it
APT = [
    ["apt-get", "update"],
    ["apt-get", "install", "-y", "chromium", "libatomic1"],
    ["apt-get", "install", "-y", "chromium-headless-shell"],  # lighter; not everywhere
]


def ways() -> list[list[list[str]]]:
    """The ways to get a Chromium on this machine, the cheapest first. Each is a list of commands."""
    if os.environ.get("MINIDPO_CHROMIUM"):  # the user named one: there is nothing to install
        return [[]]
    apt = os.geteuid() == 0 and shutil.which("apt-get")
    return [[], PLAYWRIGHT, APT] if apt else [[], PLAYWRIGHT, ALONE]


def main() -> int:
    """Try each way until there is a Chromium. Returns the exit code: 0, or 2 after one line on what to do."""
    return packages.install(ways(), find_chromium)


if __name__ == "__main__":
    sys.exit(main())
