"""The dashboard of single workers."""

from __future__ import annotations

from grafana.overview import RATE, heat, percentiles, total
from grafana.panels import Dashboard, Panel, Row

CHOSEN = 'queue=~"$queue",worker=~"$worker"'
OF_CHOSEN = f"and on (instance) tokenmill_slots{{{CHOSEN}}}"

WORK = Row(
    "Work",
    [
        Panel(
            title="Requests by how they end",
            about="Replies of each worker a second; errors of one worker alone are its own.",
            queries=[
                (total("tokenmill_requests_total", CHOSEN, "worker, finish_reason"), "{{worker}} {{finish_reason}}")
            ],
            unit="reqps",
            width=12,
        ),
        Panel(
            title="Output tokens",
            about="Tokens a second. One worker far below its like: its processor is shared, or its batches are small.",
            queries=[(total("tokenmill_output_tokens_total", CHOSEN, "worker"), "{{worker}}")],
            width=12,
        ),
        Panel(
            title="Slots in use",
            about="Slots that hold a request now, of those there are.",
            queries=[
                (f"tokenmill_slots_busy{{{CHOSEN}}}", "{{worker}} busy"),
                (f"tokenmill_slots{{{CHOSEN}}}", "{{worker}} slots"),
            ],
            width=12,
        ),
        Panel(
            title="Models",
            about="Workers by model; all workers of one queue have the same.",
            queries=[(f"sum by (model) (tokenmill_worker_info{{{CHOSEN}}})", "{{model}}")],
            kind="stat",
            width=12,
        ),
    ],
)

STEPS = Row(
    "Steps",
    [
        Panel(
            title="Duration of a step",
            about="One forward pass; a p99 far above the median is prefill, or another process on the processor.",
            queries=percentiles("tokenmill_step_seconds", CHOSEN),
            unit="s",
        ),
        Panel(
            title="Batch sizes",
            about="Requests computed in a step; a worker that is full stays at its slots.",
            queries=heat("tokenmill_step_rows", CHOSEN),
            kind="heatmap",
        ),
        Panel(
            title="Tokens of a step",
            about="Tokens computed in a step, prompts and outputs together: `--max-step-tokens` bounds them.",
            queries=heat("tokenmill_step_tokens", CHOSEN),
            kind="heatmap",
        ),
    ],
)

PROCESS = Row(
    "Process",
    [
        Panel(
            title="Processor",
            about="Processor seconds a second. Above `--threads` cannot be; far below with requests waiting: the "
            "worker waits for the broker.",
            queries=[(f"rate(process_cpu_seconds_total{RATE}) {OF_CHOSEN}", "{{instance}}")],
        ),
        Panel(
            title="Resident memory",
            about="Weights, keys and values, and Python. It follows the live tokens up to `--kv-memory-mib`.",
            queries=[(f"process_resident_memory_bytes {OF_CHOSEN}", "{{instance}}")],
            unit="bytes",
        ),
        Panel(
            title="Open files",
            about="Connections to the broker among them; growth without end is a leak.",
            queries=[(f"process_open_fds {OF_CHOSEN}", "{{instance}}")],
        ),
    ],
)

WORKER = Dashboard(
    uid="tokenmill-worker",
    title="Tokenmill: workers",
    about="What single workers do, step by step.",
    variables=[
        ("queue", "label_values(tokenmill_slots, queue)"),
        ("worker", 'label_values(tokenmill_slots{queue=~"$queue"}, worker)'),
    ],
    rows=[WORK, STEPS, PROCESS],
    links=[
        {"title": "Overview", "type": "link", "url": "/d/tokenmill-overview", "includeVars": True, "keepTime": True},
    ],
)
