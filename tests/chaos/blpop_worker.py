"""The control: a worker as one writes it in an afternoon. It takes a request off the list, works, posts the reply.

Whatever it holds when it dies is gone, and so is a request that leaves the broker while its answer gets lost.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tokenmill.shared.keys import Keys
from tokenmill.worker.engine import ContinuousBatcher
from tokenmill.worker.models.toy import ByteTokenizer, ToyModel


def generate(payload: bytes, model: ToyModel) -> tuple[str, str]:
    """Id and text of the answer to one request."""
    request = json.loads(payload)
    batcher = ContinuousBatcher(model, capacity=1)
    batcher.submit(ByteTokenizer().encode(request["prompt"]), max_tokens=request["max_tokens"])
    [finished] = batcher.run()
    return request["id"], bytes(finished.output).decode()


def main(url: str, queue: str, delay_ms: str) -> None:
    """Serve a queue until killed, or left by the harness; whatever a request does wrong is its own fault."""
    harness = os.getppid()
    client, keys = redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0), protocol=2), Keys(queue)
    model = ToyModel(slots=1, max_context=2048, delay_ms=float(delay_ms))
    while os.getppid() == harness:
        try:
            taken: Any = client.blpop([keys.requests])
            request_id, text = generate(taken[1], model)
            client.rpush(keys.reply(request_id), json.dumps({"id": request_id, "text": text}))
        except redis.RedisError:
            time.sleep(0.05)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            continue


if __name__ == "__main__":
    main(*sys.argv[1:])
