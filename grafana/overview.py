"""The dashboard of all queues and workers."""

from __future__ import annotations

from grafana.panels import Dashboard, Panel, Row

QUEUE = 'queue=~"$queue"'
RATE = "[$__rate_interval]"
TARGET_WAIT_S = 5  # what `tokenmill pool --target-wait` aims at by default


def percentiles(metric: str, chosen: str, *, by: str = "") -> list[tuple[str, str]]:
    """p50, p95 and p99 of a histogram."""
    buckets = f"sum by (le{by}) (rate({metric}_bucket{{{chosen}}}{RATE}))"
    return [(f"histogram_quantile({share / 100:g}, {buckets})", f"p{share}") for share in (50, 95, 99)]


def heat(metric: str, chosen: str) -> list[tuple[str, str]]:
    """Increases of a histogram's buckets."""
    return [(f"sum by (le) (increase({metric}_bucket{{{chosen}}}{RATE}))", "{{le}}")]


def total(metric: str, chosen: str, by: str = "") -> str:
    """Rate of a counter, summed."""
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{{{chosen}}}{RATE}))"


REQUESTS = Row(
    "Requests",
    [
        Panel(
            title="Requests by how they end",
            about="Replies a second. `deadline` means that requests waited too long: add workers. `error`: see the "
            "worker's log and `tokenmill dead list`.",
            queries=[(total("tokenmill_queue_finished_total", QUEUE, "finish_reason"), "{{finish_reason}}")],
            unit="reqps",
            stacked=True,
        ),
        Panel(
            title="Share of errors",
            about="Requests that ended with an error, of all. Above 1 %: one bad producer, or a sick model.",
            queries=[
                (
                    f'sum(rate(tokenmill_queue_finished_total{{finish_reason="error",{QUEUE}}}{RATE})) / '
                    f"{total('tokenmill_queue_finished_total', QUEUE)}",
                    "errors",
                )
            ],
            unit="percentunit",
            limit=0.01,
        ),
        Panel(
            title="Tokens",
            about="Tokens a second. Reused prompt tokens are those that an earlier request with the same beginning had "
            "computed.",
            queries=[
                (total("tokenmill_output_tokens_total", QUEUE), "output"),
                (total("tokenmill_prompt_tokens_total", QUEUE), "prompt"),
                (total("tokenmill_reused_tokens_total", QUEUE), "prompt, reused"),
            ],
            unit="short",
        ),
        Panel(
            title="Time to the reply",
            about="From enqueue to the reply, whole outputs included. Compare with the waiting time below before you "
            "blame the model.",
            queries=percentiles("tokenmill_e2e_latency_seconds", QUEUE),
            unit="s",
        ),
        Panel(
            title="Time to the first token",
            about="From enqueue to the first output token: waiting plus the prompt. High with an empty queue: prompts "
            "are long, or steps are.",
            queries=percentiles("tokenmill_time_to_first_token_seconds", QUEUE),
            unit="s",
        ),
        Panel(
            title="Time between tokens",
            about="From one output token of a request to the next. It grows with the slots of a worker, and with long "
            "prompts among running requests (`--max-step-tokens`).",
            queries=percentiles("tokenmill_inter_token_latency_seconds", QUEUE),
            unit="s",
        ),
    ],
)

WAITING = Row(
    "Queue",
    [
        Panel(
            title="Waiting and running",
            about="Requests that no worker runs, and those that one does. Waiting that only grows: more workers.",
            queries=[
                (f"sum(tokenmill_requests_waiting{{{QUEUE}}})", "waiting"),
                (f"sum(tokenmill_requests_running{{{QUEUE}}})", "running"),
                (f"sum(tokenmill_queue_max_depth{{{QUEUE}}} > 0)", "limit"),
            ],
        ),
        Panel(
            title="Age of the oldest",
            about="How long the next request in line has been waiting. Above the target for long: the pool is at its "
            "maximum, or no worker is ready.",
            queries=[(f"max by (queue) (tokenmill_queue_oldest_age_seconds{{{QUEUE}}})", "{{queue}}")],
            unit="s",
            limit=TARGET_WAIT_S,
        ),
        Panel(
            title="Waiting time of those that started",
            about="From enqueue to the first claim: what the autoscaler keeps below its target.",
            queries=percentiles("tokenmill_queue_time_seconds", QUEUE),
            unit="s",
            limit=TARGET_WAIT_S,
        ),
        Panel(
            title="Arrivals and endings",
            about="Requests accepted and requests ended, a second. Arrivals above endings for long fill the queue.",
            queries=[
                (total("tokenmill_queue_enqueued_total", QUEUE), "accepted"),
                (total("tokenmill_queue_finished_total", QUEUE), "ended"),
            ],
            unit="reqps",
        ),
        Panel(
            title="Refused and repeated",
            about="Refused: the queue was full (`tokenmill queue limits`). Repeated: pushes of a request that was "
            "there already, which is harmless. Script errors are bugs of ours: please report them.",
            queries=[
                (total("tokenmill_queue_full_total", QUEUE), "refused"),
                (total("tokenmill_queue_duplicates_total", QUEUE), "repeated"),
                (total("tokenmill_queue_script_errors_total", QUEUE), "script errors"),
            ],
            unit="reqps",
        ),
        Panel(
            title="Dead letters",
            about="Pushes that were no requests, and requests given up after crashing workers: `tokenmill dead list`.",
            queries=[(f"sum by (queue) (tokenmill_dead_letters{{{QUEUE}}})", "{{queue}}")],
            limit=1,
        ),
    ],
)

WORKERS = Row(
    "Workers",
    [
        Panel(
            title="Workers alive",
            about="Workers by state. None while requests wait: start one, or look why they end (`tokenmill info`).",
            queries=[(f"sum by (state) (tokenmill_workers{{{QUEUE}}})", "{{state}}")],
            stacked=True,
        ),
        Panel(
            title="Slots at work",
            about="Share of all slots that are busy in steps. High with requests waiting: add workers. Low with "
            "requests waiting: workers are not claiming, see their readiness.",
            queries=[
                (
                    f"{total('tokenmill_slots_busy_seconds_total', QUEUE)} / sum(tokenmill_slots{{{QUEUE}}})",
                    "busy",
                )
            ],
            unit="percentunit",
            most=1,
        ),
        Panel(
            title="Duration of a step",
            about="One forward pass of a worker. Its median is the time between tokens; its p99 shows prefill and "
            "neighbours on the processor.",
            queries=percentiles("tokenmill_step_seconds", QUEUE),
            unit="s",
        ),
        Panel(
            title="Batch sizes",
            about="Requests computed in a step. Small batches with requests waiting: too few slots a worker.",
            queries=heat("tokenmill_step_rows", QUEUE),
            kind="heatmap",
        ),
        Panel(
            title="Prompt lengths",
            about="Tokens of the prompts that were claimed.",
            queries=heat("tokenmill_request_prompt_tokens", QUEUE),
            kind="heatmap",
        ),
        Panel(
            title="Output lengths",
            about="Tokens generated by the requests that ended.",
            queries=heat("tokenmill_request_output_tokens", QUEUE),
            kind="heatmap",
        ),
        Panel(
            title="Requests taken back",
            about="Running requests that went back to the queue. `drain` is an ordinary stop. `crash`: a worker died "
            "or lost its lease; look at its log and memory. Suspected ones crashed two workers and run alone.",
            queries=[
                (total("tokenmill_requeued_total", QUEUE, "cause"), "{{cause}}"),
                (total("tokenmill_queue_fenced_total", QUEUE), "late writes refused"),
                (total("tokenmill_queue_suspected_total", QUEUE), "suspected"),
            ],
            unit="cps",
        ),
        Panel(
            title="Memory pressure and padding",
            about="Preemptions: running requests that gave their memory to older ones (raise `--kv-memory-mib`). "
            "Padded cells are computed for nothing, by models that want rectangles.",
            queries=[
                (total("tokenmill_preemptions_total", QUEUE), "preemptions"),
                (total("tokenmill_padded_tokens_total", QUEUE), "padded cells"),
            ],
            unit="cps",
        ),
        Panel(
            title="Resident memory",
            about="Memory of the worker processes. Near the limit of the container, the system kills them.",
            queries=[("sum(process_resident_memory_bytes and on (instance) tokenmill_slots)", "all workers")],
            unit="bytes",
        ),
    ],
)

BROKER = Row(
    "Broker",
    [
        Panel(
            title="Answers",
            about="1 while the broker answers. 0: workers keep computing and wait; nothing is lost.",
            queries=[(f"min(tokenmill_broker_up{{{QUEUE}}})", "up")],
            kind="stat",
            width=4,
        ),
        Panel(
            title="Memory",
            about="Memory of Redis or Valkey. At `maxmemory` producers are told to wait.",
            queries=[("redis_memory_used_bytes", "used"), ("redis_memory_max_bytes", "maxmemory")],
            unit="bytes",
            width=7,
        ),
        Panel(
            title="Commands",
            about="Commands a second. One request takes about nine.",
            queries=[(f"rate(redis_commands_processed_total{RATE})", "commands")],
            unit="ops",
            width=6,
        ),
        Panel(
            title="Queued tokens and connections",
            about="Tokens that waiting requests may take, and connections to the broker.",
            queries=[
                (f"sum(tokenmill_queued_tokens{{{QUEUE}}})", "queued tokens"),
                ("redis_connected_clients", "connections"),
            ],
            width=7,
        ),
    ],
)

OVERVIEW = Dashboard(
    uid="tokenmill-overview",
    title="Tokenmill: overview",
    about="Requests, queue, workers and broker of one or several queues.",
    variables=[("queue", "label_values(tokenmill_requests_waiting, queue)")],
    rows=[REQUESTS, WAITING, WORKERS, BROKER],
    links=[
        {"title": "Worker", "type": "link", "url": "/d/tokenmill-worker", "includeVars": True, "keepTime": True},
    ],
    annotations=[
        ("Suspended", f"max(tokenmill_queue_suspended{{{QUEUE}}}) == 1", "no worker begins anything"),
    ],
)
