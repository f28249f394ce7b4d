"""Serve one GGUF base model and any number of LoRA adapters from one process."""

import logging

from loragraph.adapters.adapter import Adapter
from loragraph.adapters.mix import Mix
from loragraph.engine.context import Context
from loragraph.engine.engine import Engine
from loragraph.engine.generate import Generation, GenerationEvent, GenerationStream, Timings
from loragraph.engine.model import Model
from loragraph.engine.one_call import generate
from loragraph.engine.request import AdapterUse, Choice, Event, Request, Result, Score
from loragraph.engine.sampler import SamplingParams
from loragraph.errors import LoragraphError
from loragraph.tools.convert import convert

__all__ = [
    "Adapter",
    "AdapterUse",
    "Choice",
    "Context",
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
    "convert",
    "generate",
]

logging.getLogger(__name__).addHandler(logging.NullHandler())
