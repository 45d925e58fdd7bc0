"""Files of requests, answered in the background by RQ jobs that feed the queue."""
