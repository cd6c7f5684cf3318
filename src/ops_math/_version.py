"""The one place that states the version; the build and `ops-math --version` read it."""

__version__ = "0.1.0"
