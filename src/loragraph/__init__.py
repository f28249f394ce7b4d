"""Serve one GGUF base model and any number of LoRA adapters from one process."""

import logging

from loragraph.adapters.adapter import Adapter
from loragraph.adapters.mix import Mix
from loragraph.engine.context import Context
from loragraph.engine.model import Model
from loragraph.errors import LoragraphError

__all__ = [
    "Adapter",
    "Context",
    "LoragraphError",
    "Mix",
    "Model",
]

logging.getLogger(__name__).addHandler(logging.NullHandler())
