"""Serve one GGUF base model and any number of LoRA adapters from one process."""

import logging

from loragraph.adapters.adapter import Adapter
from loragraph.adapters.mix import Mix
from loragraph.engine.async_stream import AsyncStream
from loragraph.engine.context import Context
from loragraph.engine.engine import Engine
from loragraph.engine.generate import Generation, GenerationEvent, GenerationStream, Timings
from loragraph.engine.logprobs import TokenLogprob
from loragraph.engine.model import Model
from loragraph.engine.one_call import generate
from loragraph.engine.params import SamplingParams
from loragraph.engine.request import AdapterUse, Choice, Embedding, Event, Request, Result, Score
from loragraph.errors import LoragraphError

__all__ = [
    "Adapter",
    "AdapterUse",
    "AsyncStream",
    "Choice",
    "Context",
    "Embedding",
    "Engine",
    "Event",
    "Generation",
    "GenerationEvent",
    "GenerationStream",
    "LoragraphError",
    "Mix",
    "Model",
    "Request",
    "Result",
    "SamplingParams",
    "Score",
    "Timings",
    "TokenLogprob",
    "generate",
]

logging.getLogger(__name__).addHandler(logging.NullHandler())
