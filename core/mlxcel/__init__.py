"""mlxcel: one language model across several machines, by layers, by ranks, or both."""

__version__ = "0.1.0"
API_VERSION = "1.0"
"""The plugin API this mlxcel offers, ``"major.minor"``; plugins state the one they need."""
