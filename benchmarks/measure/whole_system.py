"""Output tokens per second from enqueue to reply, ours and the others'."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import llama_cpp
from benchmarks.contenders import SERVER_SLOTS, Contender, llama_server, ours, rq_llama, static
from benchmarks.environments import ENVIRONMENTS, PeerError
from benchmarks.result import Result, Table
from benchmarks.samples import ratio, significant, spread
from benchmarks.settings import TOY, Bench
from benchmarks.workload import MAX_OUTPUT, MEAN_OUTPUT, PROMPT_WORDS, Work, total_output, workload
from tokenmill.worker.models.registry import smollm2_path

SAME_FILE, OTHER_KINDS = "Q4_1", ("Q4_0", "Q8_0")
OUR_SLOTS = {"fast": (64, 96), "numpy": (32, 64)}
Rates = dict[str, list[float]]


def measure(bench: Bench) -> Result:
    requests = bench.size(256, 6)
    result = Result("whole-system", "Whole system, beside what people run today", _about(requests))
    with TemporaryDirectory(prefix="tokenmill-bench-") as folder:
        chosen, trials = _servers(bench, Path(folder), result)
        contenders = [*_own(bench, requests, trials), *chosen]
        if bench.best.name != TOY:
            contenders.append(rq_llama(bench, smollm2_path(), bench.size(16, 2)))
        contenders += static(bench, bench.best, bench.size(64, 4))
        rates, settings = _rounds(bench, contenders, result)
    _tabulate(result, rates, settings)
    if trials:
        rows = [[setting, significant(rate)] for setting, rate in trials.items()]
        about = (
            f"Slot counts, each tried once on {_trial_size(bench)} requests (fast: 128); the best go into the rounds:"
        )
        result.tables.append(Table(about, ["", "tok/s"], rows))
    _judge(result, rates)
    result.notes += _versions(bench)
    return result


def _about(requests: int) -> str:
    tokens = total_output(workload(requests))
    return (
        f"The same {requests} requests for all: prompts of about {PROMPT_WORDS} words, {tokens:,} output tokens "
        f"(exponential, mean {MEAN_OUTPUT}, at most {MAX_OUTPUT}), greedy, EOS ignored, on the weights of SmolLM2-135M "
        "as Q4_1. All are enqueued at once; the clock runs from the first enqueue to the last reply, through a real "
        "Valkey and one worker process, or over HTTP for `llama-server`. The slower ones are given the first few of "
        "these requests, since a rate is per token. Our model drops a request out of a static batch when it "
        "has ended, where the usual padded batch goes on computing it."
    )


def _own(bench: Bench, requests: int, trials: dict[str, float]) -> list[Contender]:
    contenders = []
    for backend in bench.backends:
        slots = bench.slots
        if backend.name in OUR_SLOTS and not bench.quick:
            few = workload(128 if backend.name == "fast" else _trial_size(bench))  # enough to fill the slots
            tried = {n: ours(bench, backend, 0, n).rate(few) for n in OUR_SLOTS[backend.name]}
            trials.update({f"tokenmill {backend.name}, {n} slots": rate for n, rate in tried.items()})
            slots = max(tried, key=lambda n: tried[n])
        contenders.append(ours(bench, backend, requests if backend == bench.best else bench.size(128, 6), slots))
    return contenders


def _servers(bench: Bench, folder: Path, result: Result) -> tuple[list[Contender], dict[str, float]]:
    """llama-server on the same file and at its best format, each at its best slot count; and what was tried."""
    if bench.best.name == TOY:
        return [], {}
    trials: dict[str, float] = {}
    best: dict[str, tuple[float, Contender]] = {}
    counts: tuple[int, ...] = SERVER_SLOTS[:1] if bench.quick else SERVER_SLOTS
    try:
        for kind in (SAME_FILE, *OTHER_KINDS[: bench.size(2, 1)]):
            model = smollm2_path()
            if kind != SAME_FILE:
                model = llama_cpp.quantised(model, kind, folder, bench.peers)
            tried = {n: llama_server(bench, model, kind, bench.size(128, 4), n) for n in counts}
            rates = _tried(tried, workload(_trial_size(bench)), result)
            trials.update({f"llama-server, {kind}, {n} slots": rate for n, rate in rates.items()})
            counts = tuple(sorted(rates, key=lambda n: -rates[n])[:2])  # the next kinds are tried with the best two
            best[kind] = max((rate, tried[n]) for n, rate in rates.items())
    except PeerError as error:
        result.notes.append(str(error))
    kinds = {SAME_FILE, max(best, key=lambda kind: best[kind][0])} if best else set()
    return [contender for kind, (_, contender) in best.items() if kind in kinds], trials


def _tried(contenders: dict[int, Contender], work: Sequence[Work], result: Result) -> dict[int, float]:
    """Rates by slot count of those that can serve the work at all."""
    rates: dict[int, float] = {}
    for slots, contender in contenders.items():
        try:
            rates[slots] = contender.rate(work)
        except PeerError as error:
            result.notes.append(str(error))
    if not rates:
        raise PeerError("none of its slot counts could be measured")
    return rates


def _trial_size(bench: Bench) -> int:
    return bench.size(48, 2)


def _rounds(bench: Bench, contenders: list[Contender], result: Result) -> tuple[Rates, dict[str, str]]:
    """Rates by name, a round after the other; who fails is left out from then on, and said once."""
    rates: Rates = defaultdict(list)
    settings: dict[str, str] = {}
    work = workload(max(contender.requests for contender in contenders))
    for _ in range(bench.rounds):
        for contender in list(contenders):
            try:
                rates[contender.name].append(contender.rate(work[: contender.requests]))
                settings[contender.name] = f"{contender.setting}; {contender.requests} requests"
            except PeerError as error:
                result.notes.append(str(error))
                contenders.remove(contender)
                rates.pop(contender.name, None)
    return rates, settings


def _tabulate(result: Result, rates: Rates, settings: dict[str, str]) -> None:
    first = next(iter(rates))
    rows = [
        [name, settings[name], str(spread(values)), "" if name == first else str(ratio(rates[first], values))]
        for name, values in rates.items()
    ]
    titles = ["", "set to", "output tok/s", f"times slower than {first}"]
    result.tables.append(Table("Output tokens per second:", titles, rows))


def _judge(result: Result, rates: Rates) -> None:
    same = f"llama-server, {SAME_FILE}"
    servers = [name for name in rates if name.startswith("llama-server")]
    best = max(servers, key=lambda name: spread(rates[name]).value, default=same)
    for over, under, what, limit in (
        ("tokenmill fast", same, "the fast backend over llama-server on the same file", 6.0),
        ("tokenmill fast", best, "the fast backend over llama-server at its best format", 3.5),
        ("tokenmill fast", "RQ + llama-cpp-python", "the fast backend over RQ + llama-cpp-python", 10.0),
        ("tokenmill numpy", same, "the NumPy backend over llama-server on the same file", 1.5),
    ):
        if over in rates and under in rates:
            result.judge(f"throughput of {what}", ratio(rates[over], rates[under]), "at least", limit, "×")
        else:
            result.cannot_judge(f"throughput of {what}", "at least", limit, "×")


def _versions(bench: Bench) -> list[str]:
    def said(ask: Callable[[Path], str]) -> str:
        try:
            return ask(bench.peers)
        except PeerError:
            return ""

    found = [version for environment in ENVIRONMENTS if (version := said(environment.versions))]
    return [f"measured beside: {', '.join(found)}"] if found else []
