"""Frames between stations: bytes in, bytes out, no I/O."""
