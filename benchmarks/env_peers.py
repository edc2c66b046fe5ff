"""The peers' sides of env_speed.py: Farama's environment on Selenium and BrowserGym, in Pythons of their own.

    PEER_PYTHON benchmarks/env_peers.py farama --task click-link --chromium /usr/bin/chromium --html HTML

Nothing but the standard library and the peer. Says its versions when it is warm; then each line of its input,
{"seeds": [...], ...}, is a number of episodes to play with the scripted policy below, and each line of output
the number of their actions. An episode that is not solved is an error.
"""

import argparse
import importlib.metadata
import json
import os
import re
import sys
import tempfile
from pathlib import Path

# beside this script lies another miniwob.py
sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]

WORDS = {  # what the instruction says
    "click-button": r'Click on the "(.*)" button', "click-link": r'Click on the link "(.*)"\.',
    "enter-text": r'Enter "(.*)" into the text field',
    "login-user": r'username "(.*)" and the password "(.*)" into',
}  # fmt: skip

TRIES = 5


def policy(task: str, instruction: str, elements: list[dict]) -> list[tuple]:
    """What to click, and what to type where: ("click", ref) and ("type", ref, text)."""
    words = re.search(WORDS[task], instruction).groups()
    if task in ("click-button", "click-link"):
        named = [
            e
            for e in elements
            if e["text"].strip() == words[0]
            and (e["tag"] == "button" if task == "click-button" else "alink" in e["classes"])
        ]
        return [("click", named[0]["ref"])]
    fields = [e for e in elements if e["tag"] == "input"]
    button = next(e for e in elements if e["tag"] == "button")
    typed = [("type", field["ref"], text) for field, text in zip(fields, words, strict=True)]
    return [*typed, ("click", button["ref"])]


class Farama:
    """miniwob on Selenium: clicks are element.click(), not trusted input; the raw reward, as ours."""

    packages = ("miniwob", "selenium", "gymnasium")

    def __init__(self, args: argparse.Namespace):
        os.environ |= {
            "MINIWOB_CHROME_BINARY": args.chromium,
            "MINIWOB_CHROMEDRIVER": args.chromedriver,
        }
        import gymnasium
        import miniwob
        from miniwob.action import ActionTypes
        from miniwob.reward import get_raw_reward

        gymnasium.register_envs(miniwob)
        self.types = ActionTypes
        self.env = gymnasium.make(
            f"miniwob/{args.task}-v1", disable_env_checker=True, reward_processor=get_raw_reward
        ).unwrapped
        self.env.reset(seed=0)  # its Chromium starts now

    def use(self, screenshots: bool = True) -> None:
        self.env.set_record_screenshots(screenshots)

    def episode(self, task: str, seed: int) -> int:
        seen, _ = self.env.reset(seed=seed)
        elements = [
            {
                "ref": int(e["ref"]),
                "tag": e["tag"].split("_")[0],
                "text": e["text"],
                "classes": e["classes"],
            }
            for e in seen["dom_elements"]
        ]
        actions = policy(task, seen["utterance"], elements)
        for command, ref, *text in actions:
            if command == "click":
                action = self.env.create_action(self.types.CLICK_ELEMENT, ref=ref)
            else:
                action = self.env.create_action(
                    self.types.FOCUS_ELEMENT_AND_TYPE_TEXT, ref=ref, text=text[0]
                )
            _, reward, over, *_ = self.env.step(action)
        assert over and reward == 1, (task, seed, reward)
        return len(actions)


class BrowserGym:
    """browsergym-miniwob as it is; `tuned` sets its pauses to 0."""

    packages = ("browsergym-miniwob", "playwright", "gymnasium")

    def __init__(self, args: argparse.Namespace):
        os.environ["MINIWOB_URL"] = f"{(args.html / 'miniwob').as_uri()}/"
        self._lead_to(args.chromium)
        import gymnasium
        from browsergym.core.action.highlevel import HighLevelActionSet

        actions = HighLevelActionSet(subsets=["miniwob_all"])
        self.env = gymnasium.make(
            f"browsergym/miniwob.{args.task}", headless=True, action_mapping=actions.to_python_code
        )
        self.stock = (self.env.unwrapped.slow_mo, self.env.unwrapped.pre_observation_delay)

    def _lead_to(self, chromium: str) -> None:
        """Its chat window starts the browser that its Playwright would have downloaded."""
        import playwright

        names = json.loads(
            (Path(playwright.__file__).parent / "driver/package/browsers.json").read_text()
        )
        revision = next(
            each["revision"] for each in names["browsers"] if each["name"] == "chromium"
        )
        self.store = tempfile.TemporaryDirectory(prefix="env_peers_")
        program = Path(self.store.name) / f"chromium-{revision}/chrome-linux/chrome"
        program.parent.mkdir(parents=True)
        program.write_text(
            f'#!/bin/sh\nexec {chromium} --no-sandbox --disable-gpu --disable-quic "$@"\n'
        )
        program.chmod(0o755)
        (program.parents[1] / "INSTALLATION_COMPLETE").touch()
        os.environ["PLAYWRIGHT_BROWSERS_PATH"] = self.store.name

    def use(self, tuned: bool = False) -> None:
        env = self.env.unwrapped
        env.slow_mo, env.pre_observation_delay = (0, 0.0) if tuned else self.stock

    def episode(self, task: str, seed: int) -> int:
        from browsergym.utils.obs import flatten_dom_to_str
        from bs4 import BeautifulSoup

        seen, _ = self.env.reset(seed=seed)
        page = BeautifulSoup(flatten_dom_to_str(seen["dom_object"]), "html.parser")
        elements = [
            {"ref": e["bid"], "tag": e.name, "text": e.get_text(), "classes": e.get("class", [])}
            for e in page.find_all(attrs={"bid": True})
        ]
        actions = policy(task, seen["goal"], elements)
        for command, *given in actions:
            call = f"{'click' if command == 'click' else 'fill'}({', '.join(map(repr, given))})"
            for _ in range(
                TRIES
            ):  # on a busy machine its half second for an action may be over too soon
                seen, reward, over, *_ = self.env.step(call)
                if "Timeout" not in seen["last_action_error"]:
                    break
            assert not seen["last_action_error"], seen["last_action_error"]
        assert over and reward == 1, (task, seed, reward)
        return len(actions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("peer", choices=("farama", "browsergym"))
    parser.add_argument("--task", choices=tuple(WORDS), required=True)
    parser.add_argument("--chromium", required=True, help="the program")
    parser.add_argument("--html", type=Path, required=True, help="the pages' folder")
    parser.add_argument("--chromedriver", default="/usr/bin/chromedriver", help="Farama needs it")
    args = parser.parse_args()
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever a peer prints is no answer
    peer = {"farama": Farama, "browsergym": BrowserGym}[args.peer](args)
    peer.episode(args.task, 0)
    versions = {name: importlib.metadata.version(name) for name in peer.packages}
    print(json.dumps(versions), file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        seeds = order.pop("seeds")
        peer.use(**order)
        print(
            json.dumps(sum(peer.episode(args.task, seed) for seed in seeds)),
            file=answers,
            flush=True,
        )
    peer.env.close()


if __name__ == "__main__":
    main()
