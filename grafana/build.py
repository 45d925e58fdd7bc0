"""Writes the dashboards that Grafana reads: ``make dashboards``."""

from __future__ import annotations

import json
from pathlib import Path

from grafana.overview import OVERVIEW
from grafana.worker import WORKER

FOLDER = Path(__file__).parent / "dashboards"
DASHBOARDS = {"overview.json": OVERVIEW, "worker.json": WORKER}


def main() -> None:
    for name, dashboard in DASHBOARDS.items():
        (FOLDER / name).write_text(json.dumps(dashboard.as_json(), indent=1) + "\n")


if __name__ == "__main__":
    main()
