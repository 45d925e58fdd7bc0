"""Uses the system that Compose has brought up: ``check.py COMPOSE-COMMAND…``; exit code 1 if anything is lost."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

URL, KEY = "http://127.0.0.1:8080", "0123456789abcdef0123"
REQUESTS, CALLERS, TOKENS = 200, 12, 64
READY_S, ANSWER_S = 180, 180
COMPOSE = sys.argv[1:]
started = time.monotonic()


def say(line: str) -> None:
    print(f"{time.monotonic() - started:6.1f} s  {line}", flush=True)


def compose(*arguments: str) -> str:
    done = subprocess.run([*COMPOSE, *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"compose {' '.join(arguments)}: {done.stderr}")
    return done.stdout


def call(path: str, body: object = None, **headers: str) -> dict[str, object]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json", **headers}
    request = urllib.request.Request(URL + path, data, headers)
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        found: dict[str, object] = json.load(answer)
        return found


def eventually(what: str, look: object, deadline_s: float = READY_S) -> None:
    deadline = time.monotonic() + deadline_s
    while True:
        try:
            if look():  # type: ignore[operator]
                say(what)
                return
        except (OSError, urllib.error.URLError, ValueError):
            pass
        if time.monotonic() > deadline:
            raise SystemExit(f"never: {what}")
        time.sleep(0.5)


def ask(number: int) -> tuple[int, int]:
    """One completion, asked for again under its idempotency key until it is answered; its tokens, and the tries."""
    body = {
        "model": "smollm2",
        "prompt": f"Number {number} is",
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "temperature": 0,
    }
    for tries in range(1, 200):
        try:
            answer = call("/v1/completions", body, **{"Idempotency-Key": f"check-{number}"})
            return answer["usage"]["completion_tokens"], tries  # type: ignore[index]
        except (OSError, urllib.error.URLError, ValueError):
            time.sleep(0.5)
    return 0, tries


def workers() -> int:
    script = "import urllib.request as r; print(r.urlopen('http://localhost:9100/targets').read().decode())"
    return len(json.loads(compose("exec", "-T", "exporter", "python3", "-c", script)))


def targets() -> Counter[str]:
    script = "import urllib.request as r; print(r.urlopen('http://prometheus:9090/api/v1/targets').read().decode())"
    active = json.loads(compose("exec", "-T", "exporter", "python3", "-c", script))["data"]["activeTargets"]
    return Counter(f"{target['labels']['job']}: {target['health']}" for target in active)


def disturb() -> None:
    """What happens to the system while it is used."""
    compose("up", "--detach", "--no-build", "--no-recreate", "--scale", "worker=3", "worker")
    eventually("three workers", lambda: workers() == 3)
    eventually("all targets are up", lambda: targets()["workers: up"] == 3 and all(n.endswith("up") for n in targets()))
    say(", ".join(f"{n} × {name}" for name, n in sorted(targets().items())))
    compose("restart", "redis")
    eventually("three workers after a restart of Redis", lambda: workers() == 3)
    compose("up", "--detach", "--no-build", "--no-recreate", "--scale", "worker=1", "worker")
    eventually("one worker", lambda: workers() == 1)


def main() -> None:
    eventually("the gateway sees a worker", lambda: bool(call("/v1/models")["data"]))
    disturbance = threading.Thread(target=disturb)
    disturbance.start()
    with ThreadPoolExecutor(CALLERS) as pool:
        answers = list(pool.map(ask, range(REQUESTS)))
    good, tries = sum(tokens == TOKENS for tokens, _ in answers), sum(tries for _, tries in answers)
    say(f"{good} of {REQUESTS} requests answered, in {tries} tries")
    disturbance.join()
    stats = json.loads(compose("exec", "-T", "worker", "tokenmill", "info", "--json"))["stats"]
    say(f"the queue's counters: {stats}")
    if any(tokens != TOKENS for tokens, _ in answers):
        raise SystemExit("not every request was answered")
    if stats.get("finished_length") != REQUESTS:
        raise SystemExit(f"{stats.get('finished_length')} requests ended instead of {REQUESTS}")
    say("done")


if __name__ == "__main__":
    main()
