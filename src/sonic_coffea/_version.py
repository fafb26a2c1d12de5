"""The version of sonic-coffea."""

__version__ = "0.1.0"
