"""When and where a result was made, and by which code."""

import platform
import re
import shutil
import subprocess
from contextlib import suppress
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from minidpo.system import processes


def circumstances(*packages: str) -> dict:
    """Date, machine, commit, and the versions of those of these packages that are installed."""
    versions = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "date": date.today().isoformat(),
        "machine": machine_name(),
        "commit": commit(),
        "versions": versions,
    }


def commit() -> str:
    """The commit of this checkout, with a + if files have changed since; "" if this is no checkout."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return ""
    command = ["git", "describe", "--always", "--dirty=+"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True).stdout.strip()


def made_by(result: dict) -> str:
    """The circumstances of a result in words."""
    code = f"minidpo, commit {result['commit']}," if result.get("commit") else "minidpo"
    return f"Made with {code} on {result['date']}. Machine: {result['machine']}."


def machine_name(device: str | None = None) -> str:
    """System, processor and number of cores (or the device), because results depend on all of them."""
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(
        r"^model name\s*: (.*)", cpuinfo.read_text() if cpuinfo.is_file() else "", re.M
    )
    processor = names[0] if names else platform.processor() or "unknown processor"
    where = device or f"{processes.cores()} CPU cores"
    return f"{platform.system()} {platform.machine()}, {processor}, {where}"
