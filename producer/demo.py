"""The demo: the example prompts through private workers, with a summary and a few answers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape

from tokenmill.producer.batch import run_batch
from tokenmill.producer.jsonl import RequestFile
from tokenmill.shared.errors import TokenmillError, UsageError
from tokenmill.shared.protocol import Reply, StrictRequest
from tokenmill.shared.settings import DEFAULTS

ANSWERS = 3


def run_demo(prompts: str | None, output: str, *, workers: int, slots: int, model: str) -> None:
    """Answer the prompts, write the replies to ``output`` and print the summary."""
    source = prompts or str(example_prompts())
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    outcome = run_batch(source, output, redis=None, queue=DEFAULTS.queue, workers=workers, slots=slots, model=model)
    console = Console(soft_wrap=True)
    console.print(outcome.tally.table(outcome.seconds, outcome.workers))
    for request, reply in islice(_answers(source, output), ANSWERS):
        console.print(f"\n[bold]{escape(_prompt(request))}[/bold]\n{escape(reply.text.strip())}")
    console.print(f"\nAll {outcome.tally.replies} replies are in {escape(output)}.")
    if outcome.tally.failure is not None:
        raise TokenmillError(outcome.tally.failure)


def example_prompts() -> Path:
    """The example prompts: beside this module in an installed package, in ``examples`` in a checkout."""
    packaged = Path(__file__).with_name("prompts.jsonl")
    checkout = Path(__file__).resolve().parents[1] / "examples" / "prompts.jsonl"
    for path in (packaged, checkout):
        if path.exists():
            return path
    raise UsageError(f"the example prompts are missing ({checkout}); name a file with --prompts")


def _answers(source: str, output: str) -> Iterator[tuple[StrictRequest, Reply]]:
    with RequestFile(source, prefix="demo") as requests, Path(output).open("rb") as replies:
        for request, line in zip(requests.requests(), replies, strict=True):
            yield request, msgspec.json.decode(line, type=Reply)


def _prompt(request: StrictRequest) -> str:
    if isinstance(request.messages, list):
        return request.messages[-1].content
    return request.prompt if isinstance(request.prompt, str) else str(request.prompt)
