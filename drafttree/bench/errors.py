"""Errors of a bench run."""


class InputError(ValueError):
    """A file, an option or a name that the user gave is wrong."""


class EngineError(RuntimeError):
    """An engine process failed to start, or ended unexpectedly."""
