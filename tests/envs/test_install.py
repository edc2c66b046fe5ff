"""The way to a Chromium: nothing where there is one, Playwright's, Debian's, or else one clear line."""

import pytest

from envs import packages
from envs.miniwob import install
from envs.protocol import EnvError


@pytest.fixture
def machine(monkeypatch):
    """machine(root, apt, brings): a machine without a browser, on which the command `brings` adds one.

    Returns the list that fills with what was run: "playwright install", "apt-get update", "apt-get install".
    """

    def build(root=True, apt=True, brings=None):
        ran = []

        def run(command, env):
            name = " ".join(command[2:4] if "playwright" in command else command[:2])
            ran.append(name + " with libraries" * ("--with-deps" in command))

        def find_chromium():
            if brings not in ran:
                raise EnvError("no Chromium found")

        monkeypatch.delenv("MINIDPO_CHROMIUM", raising=False)
        monkeypatch.setattr(install.os, "geteuid", lambda: 0 if root else 1000)
        monkeypatch.setattr(
            install.shutil, "which", lambda name: f"/usr/bin/{name}" if apt else None
        )
        monkeypatch.setattr(packages.subprocess, "run", run)
        monkeypatch.setattr(install, "find_chromium", find_chromium)
        return ran

    return build


def test_a_chromium_that_is_there_costs_nothing(machine, monkeypatch):
    ran = machine()
    monkeypatch.setattr(install, "find_chromium", lambda: "/usr/bin/chromium")
    assert (install.main(), ran) == (0, [])


def test_playwright_s_own_comes_before_debian_s(machine):
    ran = machine(brings="playwright install with libraries")
    assert (install.main(), ran) == (0, ["playwright install with libraries"])
    ran, with_libraries = machine(brings="apt-get install"), "playwright install with libraries"
    assert (install.main(), ran) == (
        0,
        [with_libraries, "apt-get update", *["apt-get install"] * 2],
    )


def test_without_root_and_sudo_the_browser_comes_without_its_libraries(machine):
    ran = machine(root=False, brings="playwright install")
    assert (install.main(), ran) == (0, ["playwright install with libraries", "playwright install"])


@pytest.mark.parametrize("root, apt", [(False, True), (True, False)])
def test_only_root_on_debian_installs_packages(machine, capsys, root, apt):
    ran = machine(root, apt, brings="apt-get install")
    assert (install.main(), ran) == (2, ["playwright install with libraries", "playwright install"])
    assert capsys.readouterr().err == "no Chromium found\n"
