"""Atomic, elastic checkpoints in safetensors and JSON."""
