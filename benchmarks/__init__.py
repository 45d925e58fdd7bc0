"""What Tokenmill gives and costs on this machine, and others beside it: ``python -m benchmarks --help``."""
