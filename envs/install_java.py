"""Installs Java if this machine has none that is new enough.

    python -m envs.install_java

As root it installs Debian's package. Otherwise one line says what to do. `make setup-worlds` runs this.
"""

import os
import shutil
import sys

from envs import packages
from envs.jvm import java_path, java_version

APT = [["apt-get", "update"], ["apt-get", "install", "-y", "default-jre-headless"]]


def find_java() -> None:
    """Print which Java is found. Raises ValueError if none is new enough."""
    print(f"{java_path()} is Java {java_version(java_path())}")


def main() -> int:
    """Returns the exit code: 0, or 2 after one line on what to do."""
    may_install = os.geteuid() == 0 and shutil.which("apt-get")
    return packages.install([[], APT] if may_install else [[]], find_java)


if __name__ == "__main__":
    sys.exit(main())
