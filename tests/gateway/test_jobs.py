"""Jobs: accepted at once, asked about later, by their owner alone."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from tokenmill.shared.embedded import EmbeddedBroker

from ..e2e.workplace import DEADLINE_S, SLOW_TOY, Workplace, wait_for
from .conftest import KEYS, Gateway


@pytest.fixture(scope="module")
def slow(workplace: Workplace, keys: str) -> Iterator[tuple[Workplace, Gateway]]:
    """A queue of its own with a slow toy model, and a gateway in front."""
    place = Workplace(workplace.url, workplace.folder)
    place.start(SLOW_TOY, "--slots", "2")
    gateway = Gateway(place, "--api-keys", keys)
    yield place, gateway
    gateway.close()
    place.close()


@pytest.fixture
def http(slow: tuple[Workplace, Gateway]) -> Iterator[httpx.Client]:
    with caller(slow[1]) as client:
        yield client


def caller(gateway: Gateway, name: str = "alice") -> httpx.Client:
    return httpx.Client(base_url=gateway.url, headers={"Authorization": f"Bearer {KEYS[name]}"}, timeout=30)


def item(**fields: Any) -> dict[str, Any]:
    return {"prompt": "a", "max_tokens": 5, "ignore_eos": True, **fields}


def begin(http: httpx.Client, inputs: Any, **headers: str) -> dict[str, Any]:
    answer = http.post("/jobs", json=inputs, headers=headers)
    assert answer.status_code == 202, answer.text
    assert answer.headers["location"] == f"/jobs/{answer.json()['id']}"
    job: dict[str, Any] = answer.json()
    return job


def events(http: httpx.Client, job_id: str, **headers: str) -> Iterator[tuple[str, str, Any]]:
    with http.stream("GET", f"/jobs/{job_id}/events", headers=headers) as answer:
        assert answer.status_code == 200
        event: dict[str, str] = {}
        for line in answer.iter_lines():
            name, _, value = line.partition(": ")
            if line:
                event[name] = value
            elif "data" in event:
                yield event["event"], event["id"], json.loads(event["data"])
                event = {}


def test_a_job_is_accepted_at_once_and_has_its_results_later(http: httpx.Client) -> None:
    job = begin(http, item())
    assert job["status"] in ("queued", "running")
    assert job["counts"]["total"] == 1
    done = http.get(f"/jobs/{job['id']}", params={"wait": 20}).json()
    assert (done["status"], done["counts"]["succeeded"]) == ("succeeded", 1)
    [result] = done["items"]
    assert (result["status"], result["finish_reason"], result["usage"]["output_tokens"]) == ("succeeded", "length", 5)


def test_a_bad_item_fails_alone(http: httpx.Client) -> None:
    inputs = [
        item(),
        {"prompt": "a", "max_tokens": 0},
        {"nonsense": 1},
        item(stop=["x"], temperature=-1),
        item(id="mine"),
    ]
    job = begin(http, inputs)
    done = http.get(f"/jobs/{job['id']}", params={"wait": 20}).json()
    assert [result["status"] for result in done["items"]] == ["succeeded", "failed", "failed", "failed", "failed"]
    assert done["items"][1]["error"]["code"] == "invalid_request"
    assert "max_tokens" in done["items"][1]["error"]["message"]
    assert "id" in done["items"][4]["error"]["message"]
    assert (done["status"], done["counts"]) == (
        "succeeded",
        {"total": 5, "queued": 0, "running": 0, "succeeded": 1, "failed": 4, "cancelled": 0},
    )


def test_a_job_whose_items_all_fail_has_failed(http: httpx.Client) -> None:
    job = begin(http, [{"max_tokens": 3}, {"prompt": ""}])
    assert job["status"] == "failed"


def test_nobody_else_sees_a_job(http: httpx.Client, slow: tuple[Workplace, Gateway]) -> None:
    job = begin(http, item())
    with caller(slow[1], "bob") as bob:
        assert bob.get(f"/jobs/{job['id']}").status_code == 404
        assert bob.delete(f"/jobs/{job['id']}").status_code == 404
        assert bob.get(f"/jobs/{job['id']}/events").status_code == 404


def test_cancelling_keeps_what_has_ended(http: httpx.Client) -> None:
    job = begin(http, [item(), *[item(max_tokens=2000) for _ in range(4)]])
    wait_for(lambda: http.get(f"/jobs/{job['id']}").json()["counts"]["succeeded"] == 1)
    done = http.delete(f"/jobs/{job['id']}").json()
    assert done["status"] == "cancelled"
    assert (done["counts"]["succeeded"], done["counts"]["cancelled"]) == (1, 4)
    assert http.get(f"/jobs/{job['id']}").json()["status"] == "cancelled"
    assert http.delete(f"/jobs/{job['id']}").json()["counts"] == done["counts"]


def test_events_come_once_each_in_order_and_resume_after_the_last_one_read(http: httpx.Client) -> None:
    job = begin(http, [item(max_tokens=n) for n in (9, 1, 5)])
    first = []
    for event in events(http, job["id"]):
        first.append(event)
        if len(first) == 1:
            break  # the connection is lost
    rest = list(events(http, job["id"], **{"Last-Event-ID": first[-1][1]}))
    assert [(name, number) for name, number, _ in first + rest] == [
        ("item", "0"),
        ("item", "1"),
        ("item", "2"),
        ("end", "3"),
    ]
    assert [data["usage"]["output_tokens"] for name, _, data in first + rest if name == "item"] == [9, 1, 5]
    assert rest[-1][2]["status"] == "succeeded"
    assert http.get(f"/jobs/{job['id']}/events", headers={"Last-Event-ID": "x"}).status_code == 400


def test_one_idempotency_key_is_one_job(http: httpx.Client) -> None:
    inputs = [item(), item(max_tokens=2)]
    job = begin(http, inputs, **{"Idempotency-Key": "job-1"})
    assert begin(http, inputs, **{"Idempotency-Key": "job-1"})["id"] == job["id"]
    assert http.post("/jobs", json=[item()], headers={"Idempotency-Key": "job-1"}).status_code == 409


def test_too_much_pending_work_of_one_caller_is_a_429_and_the_others_go_on(
    slow: tuple[Workplace, Gateway], keys: str
) -> None:
    gateway = Gateway(slow[0], "--api-keys", keys, "--max-pending", "5")
    with caller(gateway) as alice, caller(gateway, "bob") as bob:
        job = begin(alice, [item(max_tokens=2000) for _ in range(5)])
        refused = alice.post("/jobs", json=item())
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_pending")
        assert int(refused.headers["retry-after"]) >= 1
        begin(bob, item())
        alice.delete(f"/jobs/{job['id']}")
        wait_for(lambda: alice.post("/jobs", json=item()).status_code == 202)
        assert alice.post("/jobs", json=[item()] * 6).status_code == 400
    gateway.close()


def test_a_full_queue_is_a_429_and_leaves_nothing_behind(http: httpx.Client, slow: tuple[Workplace, Gateway]) -> None:
    workplace, _ = slow
    blocker = begin(http, [item(max_tokens=2000) for _ in range(2)])
    wait_for(lambda: workplace.broker.info().running == 2 and not workplace.broker.info().waiting)
    workplace.broker.set_limits(max_depth=3)
    refused = http.post("/jobs", json=[item(max_tokens=2000) for _ in range(9)])
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert "retry-after" in refused.headers
    wait_for(lambda: workplace.broker.info().waiting == 0)
    workplace.broker.set_limits(max_depth=0)
    http.delete(f"/jobs/{blocker['id']}")


def test_a_gateway_that_is_killed_forgets_no_job(slow: tuple[Workplace, Gateway], keys: str) -> None:
    workplace, _ = slow
    first = Gateway(workplace, "--api-keys", keys)
    with caller(first) as http:
        job = begin(http, [item(max_tokens=n) for n in (3, 30)])
    first.close()
    second = Gateway(workplace, "--api-keys", keys)
    with caller(second) as http:
        done = http.get(f"/jobs/{job['id']}", params={"wait": 20}).json()
    second.close()
    assert [result["usage"]["output_tokens"] for result in done["items"]] == [3, 30]


def test_a_rate_limit_is_a_429_until_the_minute_has_room(workplace: Workplace, keys: str) -> None:
    gateway = Gateway(workplace, "--api-keys", keys, "--rate-limit", "5")
    with caller(gateway) as alice, caller(gateway, "bob") as bob:
        statuses = [alice.get("/v1/models").status_code for _ in range(6)]
        assert statuses == [200] * 5 + [429]
        assert bob.get("/v1/models").status_code == 200
    gateway.close()


def test_without_workers_a_call_is_a_503_and_a_job_waits(workplace: Workplace) -> None:
    empty = Workplace(workplace.url, workplace.folder)
    gateway = Gateway(empty)
    with httpx.Client(base_url=gateway.url) as http:  # without keys everybody on this machine may call
        refused = http.post("/v1/completions", json={"model": "toy", "prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_worker")
        assert "retry-after" in refused.headers
        job = http.post("/jobs", json=item()).json()
        late = threading.Timer(0.2, empty.start, ["toy"])
        late.start()
        assert http.get(f"/jobs/{job['id']}", params={"wait": 20}).json()["status"] == "succeeded"
        late.join()
    gateway.close()
    empty.close()


def test_a_body_beyond_the_limit_is_a_413_and_bad_json_a_400(http: httpx.Client) -> None:
    assert http.post("/jobs", json=item(prompt="x" * 3_000_000)).status_code == 413
    bad = http.post("/jobs", content=b"{", headers={"content-type": "application/json"})
    assert (bad.status_code, bad.json()["error"]["type"]) == (400, "invalid_request_error")
    assert http.get("/nothing").json()["error"]["type"] == "not_found_error"
    assert http.put("/jobs").status_code == 405


def test_what_nobody_waits_for_any_longer_goes_on(http: httpx.Client) -> None:
    job = begin(http, item(max_tokens=30))
    started = time.monotonic()
    early = http.get(f"/jobs/{job['id']}", params={"wait": 0.05}).json()
    assert time.monotonic() - started < 5
    assert early["status"] in ("queued", "running", "succeeded")
    assert http.get(f"/jobs/{job['id']}", params={"wait": 20}).json()["status"] == "succeeded"


def test_a_gateway_that_is_told_to_stop_ends_well_after_its_calls(slow: tuple[Workplace, Gateway], keys: str) -> None:
    gateway = Gateway(slow[0], "--api-keys", keys)
    with caller(gateway) as http, ThreadPoolExecutor() as pool:
        job = begin(http, item(max_tokens=60))
        answer = pool.submit(http.get, f"/jobs/{job['id']}", params={"wait": 20})
        wait_for(lambda: http.get(f"/jobs/{job['id']}").json()["status"] == "running")
        gateway.process.terminate()
        assert answer.result().json()["status"] == "succeeded"
    assert gateway.process.wait(DEADLINE_S) == 0


@pytest.mark.long
def test_a_broker_that_is_away_is_a_503_and_calls_go_on_when_it_is_back(tmp_path: Path, keys: str) -> None:
    with ExitStack() as stack:
        embedded = stack.enter_context(EmbeddedBroker())
        with redis.Redis.from_url(embedded.url) as client:
            broker_pid = int(client.info("server")["process_id"])
        place = Workplace(embedded.url, tmp_path)
        stack.callback(place.close)
        place.start("toy")
        gateway = Gateway(place, "--api-keys", keys)
        stack.callback(gateway.close)
        http = stack.enter_context(caller(gateway))
        body = {"model": "toy", "prompt": "a", "max_tokens": 2}
        assert http.post("/v1/completions", json=body).status_code == 200
        stack.callback(os.kill, broker_pid, signal.SIGCONT)
        os.kill(broker_pid, signal.SIGSTOP)
        refused = http.post("/jobs", json=item(), timeout=60)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "broker_away")
        assert http.get("/readyz").status_code == 503
        assert http.get("/livez").status_code == 200
        os.kill(broker_pid, signal.SIGCONT)
        wait_for(lambda: http.post("/v1/completions", json=body).status_code == 200)
