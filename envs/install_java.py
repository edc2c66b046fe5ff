"""Installs Java if this machine has none that is new enough.

    python -m envs.install_java

As root it takes Debian's package. Elsewhere one line says what to do. `make setup-worlds` runs this.
"""

import os
import shutil
import subprocess
import sys

from envs.jvm import java_path, java_version

APT = [["apt-get", "update"], ["apt-get", "install", "-y", "default-jre-headless"]]


def main() -> int:
    """Returns the exit code: 0, or 2 after one line on what to do."""
    may_install = os.geteuid() == 0 and shutil.which("apt-get")
    for commands in ([], APT if may_install else []):
        for command in commands:
            print("+", *command, flush=True)
            subprocess.run(command, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})
        try:
            print(f"{java_path()} is Java {java_version(java_path())}")
            return 0
        except ValueError as error:
            reason = error
    print(reason, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
