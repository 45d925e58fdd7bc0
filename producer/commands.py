"""The producer's verbs of the command line; what they need is imported when they run, not when they are listed."""

from __future__ import annotations

import sys
from typing import Any

import click

from tokenmill.shared.errors import TokenmillError
from tokenmill.shared.options import extra_option, option


@click.command()
@click.argument("source", metavar="IN.jsonl")
@extra_option("output", short="-o", default="-", metavar="OUT.jsonl", help="File of the replies; - is stdout.")
@option("redis", help="Use this broker and its workers instead of private ones: redis://HOST:PORT/DB.")
@option("queue")
@option("workers", help="Worker processes to start when there is no --redis.")
@option("slots")
@option("model")
def run(source: str, output: str, **where: Any) -> None:
    """Answer a JSONL file of requests.

    Each line of IN.jsonl (- is stdin) holds a "prompt" or "messages", any sampling field, and an "id" if you like. The
    replies come in the same order. Without --redis the command brings its own broker and workers. Ctrl-C cancels what
    is not answered.
    """
    from tokenmill.producer.batch import run_batch

    outcome = run_batch(source, output, **where)
    click.echo(outcome.tally.line(outcome.seconds), err=True)
    if outcome.tally.failure is not None:
        raise TokenmillError(outcome.tally.failure)


@click.command()
@extra_option("prompts", metavar="FILE", help="Requests to answer instead of the example prompts.")
@extra_option("output", short="-o", default="out/demo.jsonl", metavar="OUT.jsonl", help="File of the replies.")
@option("workers")
@option("slots")
@option("model")
def demo(prompts: str | None, output: str, **size: Any) -> None:
    """Answer the example prompts with private workers and sum it up."""
    from tokenmill.producer.demo import run_demo

    run_demo(prompts, output, **size)


@click.command()
@click.argument("text")
@option("redis")
@option("queue")
@extra_option("chat", is_flag=True, help="Send TEXT as the user's turn of a chat.")
@extra_option("stream", is_flag=True, help="Print the text as it is made.")
@extra_option("no_wait", is_flag=True, help="Print the id and wait for nothing, not even for room in a full queue.")
@extra_option("json", is_flag=True, help="Print the whole reply as JSON.")
@extra_option("timeout_s", type=click.FloatRange(min=0, min_open=True), help="Seconds to wait for the reply.")
@extra_option("id", help="Id of the request; a random one by default.")
@extra_option("priority", type=click.Choice(["high", "normal", "low"]), help="Whose turn comes more often.")
@extra_option("timeout_ms", type=int, help="Milliseconds until the request ends with what it has by then.")
@extra_option("idempotency_key", metavar="KEY", help="The same request under the same key is one, with one reply.")
@extra_option("max_tokens", type=int, help="Output tokens at most.")
@extra_option("min_tokens", type=int, help="Output tokens before any stop counts.")
@extra_option("temperature", type=float, help="Randomness; 0 always takes the likeliest token.")
@extra_option("top_k", type=int, help="Sample among the k likeliest tokens.")
@extra_option("top_p", type=float, help="Sample among the likeliest tokens that together have this probability.")
@extra_option("min_p", type=float, help="Drop tokens below this share of the likeliest one's probability.")
@extra_option("repetition_penalty", type=float, help="Above 1: discourage tokens that were there before.")
@extra_option("presence_penalty", type=float, help="Lower the score of tokens of the output, once each.")
@extra_option("frequency_penalty", type=float, help="Lower the score of tokens of the output, per occurrence.")
@extra_option("seed", type=int, help="The same seed gives the same output.")
@extra_option("stop", multiple=True, metavar="TEXT", help="End the output before this text; may be repeated.")
@extra_option("include_stop", is_flag=True, help="Keep the stop text in the output.")
@extra_option("ignore_eos", is_flag=True, help="Go on when the model wants to end.")
@extra_option("logprobs", type=int, help="With --json: log-probabilities, with this many alternatives a token.")
def enqueue(text: str, **given: Any) -> None:
    """Send one request and print its reply.

    TEXT is the prompt; - reads it from stdin. Ctrl-C cancels the request.
    """
    from tokenmill.producer.enqueue import Show, enqueue_text

    show = Show(*(given.pop(name) for name in ("stream", "no_wait", "json")))
    where = {name: given.pop(name) for name in ("redis", "queue", "chat", "timeout_s")}
    params = {name: value for name, value in given.items() if value is not None and value is not False and value != ()}
    enqueue_text(sys.stdin.read() if text == "-" else text, show=show, **where, params=params)


@click.command()
@option("redis")
@option("queue")
@extra_option("json", is_flag=True, help="Print it as JSON.")
def info(redis: str | None, queue: str, json: bool) -> None:
    """Show the queue, its workers and its counters."""
    from tokenmill.producer.info import show_info

    show_info(redis, queue, as_json=json)


@click.command()
@option("redis")
@option("queue")
@extra_option("interval_s", default=1.0, type=click.FloatRange(min=0.1), help="Seconds between two looks.")
@extra_option("once", is_flag=True, help="Print one look and end, as where stdout is no terminal.")
def top(redis: str | None, queue: str, interval_s: float, once: bool) -> None:
    """Watch the queue and its workers, until Ctrl-C.

    Of each worker every slot is shown: how old its request is, and how many output tokens it has; `·` is free, and one
    in another colour still reads its prompt.
    """
    from tokenmill.producer.top import show_top

    show_top(redis, queue, interval_s=interval_s, once=once)


@click.command()
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@option("redis")
@option("queue")
def cancel(ids: tuple[str, ...], redis: str | None, queue: str) -> None:
    """Cancel requests; each is answered with what it has so far.

    One that is finished or unknown is left alone, and that is no error.
    """
    from tokenmill.producer.workplace import open_broker

    fates = {
        "cancelled": "cancelled",
        "signalled": "cancelled: its worker ends it",
        "remembered": "unknown: cancelled should it come",
    }
    broker = open_broker(redis, queue)
    for request_id in ids:
        fate = broker.cancel(request_id)
        click.echo(f"{request_id}: {fates.get(fate, f'finished before ({fate})')}")


@click.command(short_help="Serve a queue's metrics.")
@option("redis")
@option("queue")
@option("metrics_host")
@extra_option(
    "metrics_port", type=click.IntRange(0, 65535), default=9100, help="Port to listen on; 0 takes a free one."
)
def exporter(redis: str | None, queue: str, metrics_host: str, metrics_port: int) -> None:
    """Serve a queue's metrics on /metrics, and its workers' addresses on /targets, for Prometheus to find them.

    One is enough for a queue: it looks at the broker when it is asked, and keeps nothing.
    """
    from tokenmill.producer.exporter import serve_metrics

    serve_metrics(redis, queue, host=metrics_host, port=metrics_port)
