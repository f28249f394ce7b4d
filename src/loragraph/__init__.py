"""One GGUF base model and any number of LoRA adapters in one process."""

__all__: list[str] = []
