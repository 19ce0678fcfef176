"""knotctl: run a language model that does not fit your machines."""

__version__ = "0.1"
