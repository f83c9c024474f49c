"""Train speculative-decoding drafters: distil, measure, export."""

__version__ = "0.1.0"
