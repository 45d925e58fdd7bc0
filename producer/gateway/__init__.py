"""The HTTP gateway: OpenAI's API and asynchronous jobs in front of the queue."""
