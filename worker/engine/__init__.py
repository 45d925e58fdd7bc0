"""Continuous batching over any language model; knows nothing of Redis, clocks, processes or text.

batcher = ContinuousBatcher(model_next, capacity=8)
batcher.submit(prompt=[1, 2, 3], max_tokens=64, stop_sequences=[[13, 13]], callback=print)
batcher.run()
"""

from .batcher import ContinuousBatcher
from .faults import ModelSickError
from .model import Batch, CallableModel, Model, ModelNext
from .params import GenerationParams
from .request import Finished, FinishReason, Request, Step, StopReason, TokenLogprobs
from .schedule import StepLimit

__all__ = [
    "Batch",
    "CallableModel",
    "ContinuousBatcher",
    "FinishReason",
    "Finished",
    "GenerationParams",
    "Model",
    "ModelNext",
    "ModelSickError",
    "Request",
    "Step",
    "StepLimit",
    "StopReason",
    "TokenLogprobs",
]
