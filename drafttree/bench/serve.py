"""The engine process's end of the pipe, the same for every engine."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from drafttree.bench.protocol import EngineSpec


def serve(start: Callable[[EngineSpec], Any]) -> None:
    """Start the engine that the first message describes, then answer calls until the pipe closes.

    The file descriptor of the pipe is the program's argument.

    Args:
        start: Makes an engine that has the methods that `EngineProcess` calls, and `info`, an
            `EngineInfo`.
    """
    pipe = Connection(int(sys.argv[1]))
    try:
        engine = start(pipe.recv())
        pipe.send(("ok", engine.info))
        while True:
            name, argument = pipe.recv()
            pipe.send(("ok", getattr(engine, name)(argument)))
    except EOFError:
        return
    except Exception as error:
        traceback.print_exc()
        sys.stderr.flush()
        pipe.send(("error", f"{type(error).__name__}: {error}"))
