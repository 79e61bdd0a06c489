"""msprobe-launch: record what every rank of a distributed training computes, without an edit."""

__version__ = "0.1.0"
