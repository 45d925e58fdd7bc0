"""The models: backends that satisfy the engine's Model protocol, and how to load one by its spec."""

from tokenmill.worker.models.registry import LoadedModel, load_model

__all__ = ["LoadedModel", "load_model"]
