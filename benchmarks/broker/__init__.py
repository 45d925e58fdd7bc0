"""What the broker costs: ``python -m benchmarks.broker --help``."""
