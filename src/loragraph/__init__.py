"""Serve one GGUF base model and any number of LoRA adapters from one process."""

import logging

from loragraph.adapters.adapter import Adapter
from loragraph.adapters.convert import convert
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
from loragraph.tools.combine import combine_files
from loragraph.tools.doctor import diagnose
from loragraph.tools.extract import extract
from loragraph.tools.merge import merge
from loragraph.tools.plan import plan
from loragraph.tools.resize import resize_file

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
    "combine_files",
    "convert",
    "diagnose",
    "extract",
    "generate",
    "merge",
    "plan",
    "resize_file",
]

logging.getLogger(__name__).addHandler(logging.NullHandler())
