"""Packages that a world needs and that are no requirement of the others."""

import importlib.metadata
import importlib.util


def require(package: str, version: str, *others: str) -> None:
    """Raises ValueError, in one line, unless exactly this version is installed, and the others that come with it.

    Another version may make other episodes of the same seeds.
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
            f"this world is {name} {version}, and {found} is installed, whose episodes may be "
            f"others: pip install {name}=={version}"
        )
