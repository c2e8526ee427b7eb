"""OpenZAYA: train, run and study ZAYA1-style mixture-of-experts language models."""

__version__ = "0.1.0"
