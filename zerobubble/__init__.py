"""zerobubble: plan, run and explain pipeline-parallel training."""

__version__ = "0.1.0"
