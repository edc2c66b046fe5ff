"""What a single world needs: its Python package, and programs to install."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Sequence

from envs.protocol import EnvError


def require(package: str, version: str, *others: str) -> None:
    """Raise ValueError in one line unless exactly this version is installed, with the modules that it needs.

    Another version may make other episodes from the same seeds.
    """
    name = package.replace("_", "-")
    for module in (package, *others):
        if importlib.util.find_spec(module) is None:
            raise ValueError(
                f"this world needs {module}, which is not installed: "
                f"make setup-worlds, or pip install {name}=={version}"
            )
    found = importlib.metadata.version(package)
    if found != version:
        raise ValueError(
            f"this world needs {name} {version}, but {found} is installed, whose episodes may differ: "
            f"pip install {name}=={version}"
        )


def install(ways: Sequence[Sequence[list[str]]], find: Callable[[], object]) -> int:
    """Run the commands of one way after another until `find` succeeds. Returns the exit code: 0, or 2 after
    printing its last error."""
    for way in ways:
        for command in way:
            print("+", *command, flush=True)
            subprocess.run(command, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})
        try:
            find()
            return 0
        except (EnvError, ValueError) as error:
            reason = error
    print(reason, file=sys.stderr)
    return 2
