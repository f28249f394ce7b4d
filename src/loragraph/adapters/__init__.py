"""Adapters: what one is, how one is read and checked, which of them a token carries."""
