"""Spare processes, forked from the template, for an engine that would spawn new Pythons.

With `multiprocessing`'s "spawn" a process gets nothing from its parent but what was pickled for it,
and imports everything again. Here, before a run begins, the run's process, which is still in the
template's state, forks processes that wait. When the engine spawns a process, a waiting one takes
the pickled object. It is a child of the engine's process, as the engine's clean-up expects, and is
not affected by what the engine has done since.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
import socket
import struct
from typing import Any

NUMBER = 3
"""Number of spare processes; further processes of an engine are spawned as usual."""

_waiting: list[tuple[int, socket.socket]] = []


def install(log: str) -> None:
    """Fork the waiting processes, and let `multiprocessing` use them instead of spawning."""
    from multiprocessing import context

    for _ in range(NUMBER):
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            ours.close()
            for _, other in _waiting:
                other.close()
            _wait(theirs, log)
        theirs.close()
        _waiting.append((pid, ours))

    def popen(process: Any) -> Any:
        return _popen_class()(process) if _waiting else spawn(process)

    spawn = context.SpawnProcess._Popen
    context.SpawnProcess._Popen = staticmethod(popen)  # type: ignore[method-assign, assignment]
    import atexit

    atexit.register(_dismiss)


def _dismiss() -> None:
    while _waiting:
        pid, link = _waiting.pop()
        link.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _popen_class() -> Any:
    from multiprocessing import (
        popen_fork,
        popen_forkserver,
        reduction,
        resource_tracker,
        spawn,
        util,
    )
    from multiprocessing.context import set_spawning_popen

    class Popen(popen_forkserver.Popen):
        """Sends a process object to a waiting process."""

        method = "spawn"
        poll = popen_fork.Popen.poll

        def _launch(self, process: Any) -> None:
            tracker = self.duplicate_for_child(resource_tracker.getfd())
            buffer = io.BytesIO()
            set_spawning_popen(self)
            try:
                preparation = spawn.get_preparation_data(process._name)
                reduction.dump((dict(os.environ), tracker, preparation), buffer)
                reduction.dump(process, buffer)
            finally:
                set_spawning_popen(None)
            self.pid, link = _waiting.pop(0)
            self.sentinel, child_end = os.pipe()
            parent_end, held = os.pipe()
            content = buffer.getvalue()
            handles = [parent_end, child_end, *self._fds]
            link.sendall(struct.pack("qq", len(content), len(handles)))
            reduction.sendfds(link, handles)
            link.sendall(content)
            link.close()
            os.close(child_end)
            os.close(parent_end)
            self.finalizer = util.Finalize(self, util.close_fds, (self.sentinel, held))

    return Popen


def _wait(link: socket.socket, log: str) -> None:
    """Run the process object that is sent to this waiting process; end if none will be sent."""
    status = 1
    try:
        head = link.recv(16, socket.MSG_WAITALL)
        if len(head) < 16:
            os._exit(0)
        status = _become(link, *struct.unpack("qq", head), log)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)


def _become(link: socket.socket, length: int, count: int, log: str) -> int:
    from multiprocessing import forkserver, process, reduction, resource_tracker, spawn

    parent_end, _child_end, *handles = reduction.recvfds(link, count)
    content = io.BytesIO(link.recv(length, socket.MSG_WAITALL))
    link.close()
    environment, tracker, preparation = pickle.load(content)
    _waiting.clear()
    signal.set_wakeup_fd(-1)
    from engine_host import template

    template.enter(environment, log)
    resource_tracker._resource_tracker._fd = handles[tracker]  # type: ignore[attr-defined]
    forkserver._forkserver._inherited_fds = handles  # type: ignore[attr-defined]
    process.current_process()._inheriting = True  # type: ignore[attr-defined]
    try:
        spawn.prepare(preparation)
        import hooks

        hooks.install()
        made = pickle.load(content)
    finally:
        del process.current_process()._inheriting  # type: ignore[attr-defined]
    status: int = made._bootstrap(parent_sentinel=parent_end)
    return status
