"""Games that run in Java: one small JVM in which every environment has its own game.

    java = Java("scienceworld", "1.2.3", "scienceworld.jar", "scienceworld.runtime.pythonapi.PythonInterface")
    game = java.game()
    game("load", "boil", 0, "easy", False)

Each game loads its classes anew. With one class loader all games would share one stream of random numbers, which
is static there, and an episode would depend on the others that are played beside it.
"""

import asyncio
import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, TypeVar

from envs import free_text, packages
from envs.protocol import Env, EnvError, Observation, Outcome, World

OPTIONS = [
    "-Xmx512m",
    "-XX:+UseSerialGC",
    # Sets are listed in the order of their objects' hashes, which are random unless they are all alike
    "-XX:+UnlockExperimentalVMOptions",
    "-XX:hashCode=2",
]
OLDEST = 8  # Java's version
ANSWER_S = 60
"Seconds that a call may take; a load takes up to 4 on a busy machine."
Answer = TypeVar("Answer")


class Java:
    """A JVM that starts with the first game, starts again if it died, and ends with this process.

    Games that are no longer used are kept for the next place, because loading the classes takes two seconds per game.
    """

    def __init__(self, package: str, version: str, jar: str, interface: str):
        self.package, self.version, self.jar, self.interface = package, version, jar, interface
        self.forget()
        os.register_at_fork(after_in_child=self.forget)

    def forget(self) -> None:
        """Forget the JVM. A forked child must not use its parent's, or their answers would be mixed up."""
        self.process: subprocess.Popen | None = None
        self.spare: list[Game] = []
        self._lock, self._asking = threading.Lock(), threading.Lock()
        self._asked: Game | None = None

    def require(self) -> None:
        """Raise ValueError in one line if a package is missing, or Java is missing or too old."""
        packages.require(self.package, self.version, "py4j")
        java_version(java_path())

    def game(self) -> "Game":
        """A free game. Raises ValueError if this machine cannot play, EnvError if Java does not start."""
        with self._lock:
            if self.process is None or self.process.poll() is not None:
                self.spare.clear()
                self._start()
            return self.spare.pop() if self.spare else Game(self.process, *self._load())

    def ask(self, question: Callable[["Game"], Answer]) -> Answer:
        """Ask a game that no environment uses, for example for an instance's solution."""
        with self._asking:
            try:
                self._asked = self._asked or self.game()
                return question(self._asked)
            except EnvError:  # it has died since
                self._asked = self.game()
                return question(self._asked)

    def _start(self) -> None:
        self.require()
        from py4j.java_gateway import launch_gateway

        try:
            self._port, self._token, self.process = launch_gateway(
                java_path=java_path(),
                javaopts=OPTIONS,
                die_on_exit=True,
                enable_auth=True,
                cwd=self._folder(),  # TextWorldExpress reads files there
                return_proc=True,
            )
        except (OSError, ValueError):
            said = f"{java_path()} {' '.join(OPTIONS)} -version"
            raise EnvError(f"Java did not start; this says why: {said}") from None

    def _folder(self) -> str:
        return importlib.util.find_spec(self.package).submodule_search_locations[0]

    def _load(self) -> tuple[Any, Any, Any, Any]:
        """(gateway, class loader, interface, source of random numbers) of a new game, shared with no other game."""
        from py4j.java_gateway import GatewayParameters, JavaGateway
        from py4j.protocol import Py4JError

        # Also its own connection, because each connection of py4j remembers methods by the name of their class.
        parameters = GatewayParameters(
            port=self._port,
            auth_token=self._token,
            read_timeout=ANSWER_S,
            enable_memory_management=False,
        )
        gateway = JavaGateway(gateway_parameters=parameters)
        gateway.set_gateway_client(one_try(parameters, gateway.gateway_property))
        jar = Path(self._folder(), self.jar)
        try:
            urls = gateway.new_array(gateway.jvm.java.net.URL, 1)
            urls[0] = gateway.jvm.java.io.File(str(jar)).toURI().toURL()
            system = gateway.jvm.java.lang.ClassLoader.getSystemClassLoader()
            loader = gateway.jvm.java.net.URLClassLoader(urls, system.getParent())
            interface = loader.loadClass(self.interface).newInstance()
            random = loader.loadClass("scala.util.Random$").getField("MODULE$").get(None)
            return gateway, loader, interface, random
        except Py4JError as error:
            said = cause(error)  # while Java can be asked
            self.process.kill()
            self.process.wait()
            raise EnvError(f"{self.package} did not start in Java: {said}") from None


class Game:
    """A game in the JVM. Calling it calls a method of its interface. Raises EnvError if that fails."""

    def __init__(
        self, process: subprocess.Popen, gateway: Any, loader: Any, interface: Any, random: Any
    ):
        self.process, self.gateway, self.loader = process, gateway, loader
        self.interface, self.random = interface, random
        self.met: set[str] = set()  # tasks that were played in it

    def __call__(self, method: str, *args: Any) -> Any:
        return self.call(self.interface, method, *args)

    def seed(self, number: int = 0) -> None:
        """Restart its random numbers, whatever was played before."""
        self.call(self.call(self.random, "self"), "setSeed", number)

    def new(self, name: str, part: Any) -> Any:
        """A new object of one of its classes, constructed from one part."""
        parts = self.gateway.new_array(self.gateway.jvm.java.lang.Object, 1)
        parts[0] = part
        made = self.call(self.loader, "loadClass", name).getConstructors()[0]
        return self.call(made, "newInstance", parts)

    def call(self, thing: Any, method: str, *args: Any) -> Any:
        """The result of a method of one of its objects. Raises EnvError if the call fails."""
        from py4j.protocol import Py4JError, Py4JNetworkError

        try:
            return getattr(thing, method)(*args)
        except Py4JNetworkError:
            self.process.kill()  # it is dead or never ends its calculation
            self.process.wait()
            raise EnvError(f"Java ended, or took {ANSWER_S} s for {method}") from None
        except Py4JError as error:
            raise EnvError(f"Java failed at {method}: {cause(error)}") from None


class Place(Env):
    """An environment whose game is in the JVM. A world derives from it and defines `begin` and `act`, which may block.

    The reward is the highest score so far. If the JVM dies, another is started and the episode is replayed up to the
    same point. If it does not look the same there, EnvError is raised.
    """

    def __init__(self, java: Java):
        self.java, self.game = java, None
        self.open, self.busy = True, False

    def begin(self, task: str, seed: int) -> tuple[str, str, float]:
        """Start an instance in `self.game`. Returns instruction, text and score."""
        raise NotImplementedError

    def act(self, action: str) -> tuple[str, float, Outcome | None]:
        """Carry out an action. Returns text, score and, at the end, the outcome."""
        raise NotImplementedError

    async def reset(self, task: str, seed: int) -> Observation:
        """Start the instance."""
        self.instance, self.actions, self.seen = (task, seed), [], []
        return await asyncio.to_thread(self._next)

    async def step(self, action: str) -> Observation:
        """Carry out one action. An action that the game does not understand is a step, too, and its text says so."""
        self.actions.append(action)
        return await asyncio.to_thread(self._next)

    def close(self) -> None:
        """Free the game for others, unless an abandoned call still runs in it."""
        self.open = False
        if self.game is not None and self.game.process is self.java.process and not self.busy:
            self.java.spare.append(self.game)

    def _next(self) -> Observation:
        self.busy = True
        try:
            return self._look()
        except EnvError:
            self.game = None
            if not self.open:
                raise
            return self._look()
        finally:
            self.busy = False

    def _look(self) -> Observation:
        """The observation after the last action."""
        if self.game is None:
            self.game = self.java.game()
            before, self.seen = self.seen, []
            for seen in before:
                if self._turn() != seen:
                    raise EnvError(f"{self.instance}: the replay does not look the same")
        return self._turn()

    def _turn(self) -> Observation:
        """Begin the episode, or carry out the first action that was not carried out yet."""
        if not self.seen:
            self.instruction, text, score = self.begin(*self.instance)
            outcome = None
        else:
            text, score, outcome = self.act(self.actions[len(self.seen) - 1])
            score = max(score, self.seen[-1].reward)
        self.seen.append(Observation(self.instruction, text, outcome, score))
        return self.seen[-1]


@contextlib.asynccontextmanager
async def opened(places: Sequence[Place]) -> AsyncIterator[Sequence[Env]]:
    """Yield the places and close them at the end."""
    try:
        yield places
    finally:
        for place in places:
            place.close()


class JavaWorld(World):
    """The base of worlds in Java. A world derives from it and names its JVM and its type of place."""

    java: Java
    place: type[Place]
    shows_state = False
    parse, render = staticmethod(free_text.parse), staticmethod(free_text.render)

    def require(self, watch: bool = False) -> None:
        """Raise ValueError in one line if a package is missing, or Java is missing or too old."""
        self.java.require()

    def open(self, places: int, watch: bool = False) -> AbstractAsyncContextManager[Sequence[Env]]:
        """Places in one JVM."""
        return opened([self.place(self.java) for _ in range(places)])


def java_path() -> str:
    """The path of `java`. Raises ValueError if there is none."""
    home = os.environ.get("JAVA_HOME")
    path = shutil.which("java", path=f"{home}/bin" if home else None)
    if path is None:
        where = f"in JAVA_HOME={home}" if home else "on this machine"
        raise ValueError(
            f"this world needs Java {OLDEST} or newer, and there is none {where}: make setup-worlds, "
            "or on Debian apt-get install default-jre-headless"
        )
    return path


def java_version(path: str) -> int:
    """Java's version, such as 8 or 17. Raises ValueError if it is too old or does not run."""
    try:
        done = subprocess.run([path, "-version"], capture_output=True, text=True, timeout=ANSWER_S)
        said = done.stderr + done.stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        said = str(error)
    found = re.search(r'version "(?:1\.)?(\d+)', said)
    version = int(found[1]) if found else 0
    if version < OLDEST:
        raise ValueError(
            f"this world needs Java {OLDEST} or newer, and {path} says {said[:80]!r}: "
            "make setup-worlds, or on Debian apt-get install default-jre-headless"
        )
    return version


def one_try(parameters: Any, properties: Any) -> Any:
    """py4j's client without its second try, because an action that is sent twice would be carried out twice."""
    from py4j.java_gateway import GatewayClient

    class OneTry(GatewayClient):
        def send_command(self, command, retry=True, binary=False):
            connection = self._get_connection()
            answer = connection.send_command(command)
            self._give_back_connection(connection)
            return answer

    client = OneTry(gateway_parameters=parameters)
    client.gateway_property = properties
    return client


def cause(error: Exception) -> str:
    """What went wrong in Java, in one line."""
    from py4j.protocol import Py4JError

    try:
        said = str(error)  # which asks Java
    except Py4JError:
        return "it has ended"
    lines = [line.strip(": ") for line in said.splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("java.")), lines[0])[:200]
