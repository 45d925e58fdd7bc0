"""Files and batches through OpenAI's own client, and a gateway that is killed in the middle of one."""

from __future__ import annotations

import io
import json
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from ..batches.conftest import DEADLINE_S, Bureau, line
from ..e2e.workplace import Workplace, wait_for
from .conftest import Gateway


@pytest.fixture(scope="module")
def place(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bureau]:
    """A queue of its own with a toy worker and a batch worker."""
    bureau = Bureau(Workplace(workplace.url, tmp_path_factory.mktemp("batches")))
    bureau.workplace.start("toy:delay_ms=2", "--slots", "16")
    bureau.start()
    yield bureau
    bureau.workplace.close()


def serve(place: Bureau, keys: str) -> Gateway:
    return Gateway(place.workplace, "--api-keys", keys, "--files-dir", place.environment["TOKENMILL_FILES_DIR"])


@pytest.fixture(scope="module")
def gateway(place: Bureau, keys: str) -> Iterator[Gateway]:
    gateway = serve(place, keys)
    yield gateway
    gateway.close()


def upload(client: openai.OpenAI, lines: list[dict[str, Any]]) -> str:
    content = "".join(json.dumps(part) + "\n" for part in lines).encode()
    return client.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch").id


def begin(client: openai.OpenAI, lines: list[dict[str, Any]]) -> str:
    return client.batches.create(
        input_file_id=upload(client, lines), endpoint="/v1/completions", completion_window="24h", metadata={"a": "b"}
    ).id


def ended(client: openai.OpenAI, batch_id: str) -> Any:
    wait_for(lambda: client.batches.retrieve(batch_id).status in ("completed", "failed", "cancelled"), DEADLINE_S)
    return client.batches.retrieve(batch_id)


def answers(client: openai.OpenAI, file_id: str) -> list[dict[str, Any]]:
    return [json.loads(raw) for raw in client.files.content(file_id).text.splitlines()]


def test_a_batch_from_upload_to_download(client: openai.OpenAI) -> None:
    batch_id = begin(client, [line(0), line(1, echo=True), line(2)])
    batch = ended(client, batch_id)
    assert (batch.status, batch.metadata) == ("completed", {"a": "b"})
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (3, 2, 1)
    assert {answer["custom_id"] for answer in answers(client, batch.output_file_id)} == {"line-0", "line-2"}
    [error] = answers(client, batch.error_file_id)
    assert (error["custom_id"], error["response"]["status_code"]) == ("line-1", 400)
    assert batch_id in [found.id for found in client.batches.list(limit=3)]
    assert batch.completed_at >= batch.in_progress_at >= batch.created_at


def test_a_batch_of_chats_on_the_real_model(workplace: Workplace, keys: str) -> None:
    place = Bureau(workplace)
    worker = place.start()
    gateway = serve(place, keys)
    body = {"model": "smollm2", "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8}
    asked = {"custom_id": "hello", "method": "POST", "url": "/v1/chat/completions", "body": body}
    with gateway.client() as client:
        begun = client.batches.create(
            input_file_id=upload(client, [asked]), endpoint="/v1/chat/completions", completion_window="24h"
        )
        batch = ended(client, begun.id)
        [answer] = answers(client, batch.output_file_id)
    assert answer["custom_id"] == "hello"
    assert answer["response"]["body"]["choices"][0]["message"]["content"]
    gateway.close()
    worker.kill()


def test_files_are_listed_read_and_forgotten(client: openai.OpenAI) -> None:
    file_id = upload(client, [line(0)])
    assert client.files.retrieve(file_id).purpose == "batch"
    assert file_id in [file.id for file in client.files.list()]
    assert answers(client, file_id)[0]["custom_id"] == "line-0"
    assert client.files.delete(file_id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file_id)


def test_files_and_batches_are_a_callers_own(gateway: Gateway, client: openai.OpenAI) -> None:
    batch_id = begin(client, [line(0)])
    batch = ended(client, batch_id)
    with gateway.client("bob") as bob:
        with pytest.raises(openai.NotFoundError):
            bob.batches.retrieve(batch_id)
        with pytest.raises(openai.NotFoundError):
            bob.files.content(batch.output_file_id)
        with pytest.raises(openai.BadRequestError, match="no file"):
            bob.batches.create(input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h")
        assert list(bob.batches.list()) == []


def test_a_bad_input_fails_with_its_line(client: openai.OpenAI) -> None:
    batch = ended(client, begin(client, [line(0), line(0)]))
    assert batch.status == "failed"
    assert [(error.code, error.line) for error in batch.errors.data] == [("duplicate_custom_id", 2)]


def test_a_cancelled_batch_keeps_what_it_has(client: openai.OpenAI) -> None:
    batch_id = begin(client, [line(i, max_tokens=20) for i in range(1000)])
    wait_for(lambda: client.batches.retrieve(batch_id).request_counts.completed > 10)
    assert client.batches.cancel(batch_id).status in ("cancelling", "finalizing")
    batch = ended(client, batch_id)
    assert batch.status == "cancelled"
    assert batch.request_counts.completed + batch.request_counts.failed == 1000
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch_id)


def test_a_killed_gateway_leaves_a_batch_as_it_is(place: Bureau, keys: str) -> None:
    first = serve(place, keys)
    with first.client() as client:
        before = place.workplace.broker.info().stats["finished_length"]
        batch_id = begin(client, [line(i) for i in range(2000)])
        wait_for(lambda: client.batches.retrieve(batch_id).request_counts.completed > 100)
    first.close()
    second = serve(place, keys)
    with second.client() as client:
        batch = ended(client, batch_id)
        names = Counter(answer["custom_id"] for answer in answers(client, batch.output_file_id))
    second.close()
    assert names == Counter(f"line-{i}" for i in range(2000))
    assert place.workplace.broker.info().stats["finished_length"] - before == 2000


def test_a_file_beyond_the_limit_is_a_413(place: Bureau, keys: str) -> None:
    gateway = Gateway(place.workplace, "--api-keys", keys, "--max-file-bytes", "100000")
    started = time.monotonic()
    with gateway.client() as client, pytest.raises(openai.APIStatusError) as caught:
        client.files.create(file=("in.jsonl", io.BytesIO(b"x" * 150_000)), purpose="batch")
    assert caught.value.status_code == 413
    assert time.monotonic() - started < 30
    gateway.close()
