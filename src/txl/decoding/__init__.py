"""Tokens one by one, for many streams at once, in constant memory."""

from txl.decoding.engine import DecodeEngine, Stream
from txl.decoding.sampling import Sampling

__all__ = ["DecodeEngine", "Sampling", "Stream"]
