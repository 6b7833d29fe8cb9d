"""The version that stands in."""

__version__ = "1.2.1"
