"""The requests of the benchmarks: prompts of ordinary words, and output lengths from a seeded distribution."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tokenmill.shared.errors import UsageError

MEAN_OUTPUT, MAX_OUTPUT, SEED = 48, 192, 7
PROMPT_WORDS = 35
_SPREAD = 8  # words by which a prompt is shorter or longer at most

# The commonest nouns, verbs, adjectives and small words of English: about 1.2 tokens each for most tokenizers.
WORDS = tuple(
    """
    time year people way day man thing woman life child world school state family student group country problem hand
    part place case week company system program question work government number night point home water room mother area
    money story fact month lot right study book eye job word business issue side kind head house service friend father
    power hour game line end member law car city community name president team minute idea body information back parent
    face level office door health person art war history party result change morning reason research girl guy moment air
    teacher force education ask need feel become leave put mean keep let begin seem help talk turn start show hear play
    run move like live believe hold bring happen write provide sit stand lose pay meet include continue set learn lead
    understand watch follow stop create speak read allow add spend grow open walk win offer remember love consider
    appear buy wait serve die send expect build stay fall cut reach kill remain good new first last long great little
    own other old big high different small large next early young important few public bad same able and but or so with
    from about into over after under between through before against during without within among the a this that every
    """.split()  # noqa: SIM905 (a list of them would be pages)
)


@dataclass(frozen=True, slots=True)
class Work:
    """One request: its prompt, and how many tokens it is made to generate."""

    prompt: str
    n_output: int


def workload(n: int, *, seed: int = SEED, words: int = PROMPT_WORDS) -> list[Work]:
    """``n`` requests with prompts of about ``words`` words; lengths are exponential, mean 48, cut at 192."""
    rng = np.random.default_rng(seed)
    lengths = output_lengths(n, seed=seed)
    return [Work(prompt(rng, words + int(rng.integers(-_SPREAD, _SPREAD + 1))), length) for length in lengths]


def prompt(rng: np.random.Generator, n_words: int) -> str:
    """A prompt of ordinary words; no two are alike."""
    return " ".join(WORDS[i] for i in rng.integers(0, len(WORDS), max(1, n_words))).capitalize()


def output_lengths(n: int, *, seed: int = SEED) -> list[int]:
    """Output tokens of ``n`` requests."""
    drawn = np.random.default_rng(seed).exponential(MEAN_OUTPUT, n)
    return [int(length) for length in np.ceil(drawn).clip(1, MAX_OUTPUT)]


def arrivals(n: int, rate: float, *, seed: int = SEED) -> list[float]:
    """Seconds at which ``n`` requests of a Poisson process of ``rate`` a second arrive, from 0 on."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, n)
    return [float(moment) for moment in np.cumsum(gaps) - gaps[0]]


def questions(path: Path) -> list[str]:
    """The turns of a JSON Lines file of ``{"turns": [TEXT, …]}``; UsageError says what is missing."""
    if not path.is_file():
        raise UsageError(f"no questions at {path}: give a JSON Lines file of {{'turns': [TEXT, …]}} with --questions")
    return [turn for line in path.read_text().splitlines() for turn in json.loads(line)["turns"]]


def total_output(work: Sequence[Work]) -> int:
    """Tokens that the requests generate."""
    return sum(request.n_output for request in work)
