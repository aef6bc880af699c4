"""What can go wrong in a bench run: the user's input, or the engine."""


class InputError(ValueError):
    """A file, an option or a name the user gave is wrong."""


class EngineError(RuntimeError):
    """An engine process failed to start or died."""
