"""Generate, stream and map over many prompts with the client for threads: python sync_client.py"""

import os

from tokenmill.producer.client import Client
from tokenmill.producer.request import IdInUseError

client = Client(os.environ.get("TOKENMILL_REDIS", "redis://127.0.0.1:6379/0"))

reply = client.generate("The capital of France is", max_tokens=5, timeout=60)
print(repr(reply.text), reply.finish_reason, f"{reply.usage.output_tokens} tokens in {reply.e2e_ms:.0f} ms")

# Output as it is made; leaving the block early would cancel the request.
chat = [{"role": "user", "content": "Name three colours."}]
with client.stream(messages=chat, max_tokens=40, timeout=60, cancel_on_close=True) as stream:
    for text in stream:
        print(text, end="", flush=True)
print(f"\n{stream.reply.finish_reason}")

# Thousands of prompts, a window of them on the queue at a time, in input order. One bad request spoils no other.
prompts = [{"prompt": f"{n} plus {n} is", "seed": n} for n in range(1, 9)] + [{"prompt": ""}]
for reply in client.map(prompts, max_tokens=4, priority="low"):
    print(reply.error.message if reply.error else repr(reply.text))

# A retry with the same id is the same request; another request under that id is an error.
request_id = client.submit("Once upon a time", id=f"story-{os.getpid()}", max_tokens=500)
try:
    client.submit("Something else", id=request_id)
except IdInUseError as error:
    print(error)
print("cancel:", client.cancel(request_id), "→", client.wait(request_id, timeout=60).finish_reason)
