"""What a run of the benchmarks is told: models, sizes, and where the others are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenmill.shared.settings import DEFAULTS
from tokenmill.worker.models import LoadedModel, load_model

ROOT = Path(__file__).parent.parent
PEERS = ROOT / ".venv-peers"
TRACES = Path("../shared/data")
QUESTIONS = TRACES / "mt_bench_questions.jsonl"
TOY, LLAMACPP = "toy", "llamacpp"


@dataclass(frozen=True, slots=True)
class Backend:
    """A model on the code that computes it."""

    name: str  # numpy, fast, llamacpp; toy computes nothing
    model: str

    def options(self) -> list[str]:
        """Of ``tokenmill worker``."""
        chosen = [] if self.name in (TOY, LLAMACPP) else ["--backend", self.name]
        return ["--model", self.model, *chosen]

    def load(self, *, slots: int, threads: int, max_context: int = DEFAULTS.max_context) -> LoadedModel:
        """The model in this process."""
        backend = DEFAULTS.backend if self.name in (TOY, LLAMACPP) else self.name
        return load_model(self.model, slots=slots, threads=threads, max_context=max_context, backend=backend)


@dataclass(frozen=True, slots=True)
class Bench:
    """One run: its sizes are those of the report, or just enough to see that everything works."""

    backends: tuple[Backend, ...]
    rounds: int
    quick: bool = False
    peers: Path = PEERS
    questions: Path = QUESTIONS
    traces: Path = TRACES
    slots: int = 64
    threads: int = 2

    def size(self, full: int, quick: int) -> int:
        """How many of something."""
        return quick if self.quick else full

    def backend(self, name: str) -> Backend | None:
        """A backend of this run."""
        return next((backend for backend in self.backends if backend.name == name), None)

    @property
    def best(self) -> Backend:
        """The backend that what concerns them all is measured with."""
        return self.backends[0]


def backends(names: Sequence[str], model: str) -> tuple[Backend, ...]:
    """One for each name; the toy model has no other."""
    if model.startswith(TOY):
        return (Backend(TOY, model),)
    return tuple(Backend(name, model) for name in names)
