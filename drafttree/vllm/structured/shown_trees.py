"""Shows the scheduler the trees that a model runner drafts within a step.

The scheduler masks the nodes of requests with structured output while the step is under way. Where
it shares the model runner's process, the trees are an attribute of the step. In vLLM's
multiprocessing executor they take a connection of their own, as whatever else a worker is asked for
waits for the end of the step. Each step of `may_show_trees` is one message, so that both ends know
which step a message is of. The first of several tensor-parallel ranks sends it.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any

from vllm import envs

from drafttree.vllm import patches
from drafttree.vllm.structured.shapes import Drafted, DraftedTrees

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput


def why_not_shown(parallel: Any) -> str | None:
    """Why the scheduler cannot see what a worker drafts within a step; None if it can."""
    backend = parallel.distributed_executor_backend
    if _shares_process(parallel) or (backend == "mp" and sys.platform == "linux"):
        return None
    return (
        f"with distributed_executor_backend={backend!r} the scheduler does not see trees that are "
        "drafted within a step: use mp, on Linux"
    )


def may_show_trees(output: SchedulerOutput) -> bool:
    """Whether a step may have trees of requests with structured output."""
    return output.has_structured_output_requests and bool(output.scheduled_spec_decode_tokens)


class TreeSender:
    """The end of the model runner.

    Args:
        config: The engine's configuration.
        is_first: Whether this is the first rank.
    """

    def __init__(self, config: VllmConfig, *, is_first: bool) -> None:
        self._shares_process = _shares_process(config.parallel_config)
        self._messages: SimpleQueue[Callable[[], DraftedTrees] | None] | None = None
        self._is_sent = False
        if is_first and not self._shares_process:
            address, key = _address(config)
            self._messages = SimpleQueue()
            listener = Listener(address, "AF_UNIX", authkey=key)
            # The worker must wait neither for the scheduler nor for the device.
            Thread(target=_send, args=(listener, self._messages), daemon=True).start()

    def show(self, output: SchedulerOutput, trees: Callable[[], DraftedTrees]) -> None:
        """Show the trees of a step that is under way.

        Args:
            output: The step.
            trees: Returns them; may wait for the device.
        """
        if self._shares_process:
            patches.show_drafted(output, trees)
        elif self._messages is not None and may_show_trees(output):
            self._messages.put(trees)
            self._is_sent = True

    def end(self, output: SchedulerOutput) -> None:
        """End a step; if it could have shown trees, the scheduler waits to hear of none, too."""
        if self._messages is not None and may_show_trees(output) and not self._is_sent:
            self._messages.put(dict)
        self._is_sent = False

    def close(self) -> None:
        """Close the connection."""
        if self._messages is not None:
            self._messages.put(None)


class TreeReceiver:
    """The end of the scheduler, which is made after the workers.

    Args:
        config: The engine's configuration.
    """

    def __init__(self, config: VllmConfig) -> None:
        self._connection: Connection | None = None
        parallel = config.parallel_config
        drafts_in_step = patches.key_of_trees(config.speculative_config) is not None
        is_needed = drafts_in_step and not _shares_process(parallel)
        if is_needed and why_not_shown(parallel) is None:
            address, key = _address(config)
            self._connection = Client(address, "AF_UNIX", authkey=key)

    def trees(self, output: SchedulerOutput) -> DraftedTrees:
        """The trees of a step that is under way; waits until they are drafted.

        Raises:
            RuntimeError: The worker has ended, or has drafted nothing for too long.
        """
        connection = self._connection
        if connection is None:
            return patches.drafted_in(output)
        if not may_show_trees(output):
            return {}
        seconds = envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
        try:
            if not connection.poll(seconds):
                raise RuntimeError(f"no draft trees came from the worker within {seconds} s")
            trees = json.loads(connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise RuntimeError("the worker has ended while it was to draft") from error
        return {name: Drafted(*tree) for name, tree in trees.items()}

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()


def _shares_process(parallel: Any) -> bool:
    """Whether an engine's only worker runs in the scheduler's process."""
    return parallel.world_size == 1 and parallel.distributed_executor_backend in (None, "uni")


def _address(config: VllmConfig) -> tuple[str, bytes]:
    """The address of an engine's connection, and its key; replicas have connections of their own.

    The address names no file, so that none is left behind.
    """
    key = patches.key_of_trees(config.speculative_config)
    assert key is not None
    replica = str(config.parallel_config.data_parallel_index)
    name = hashlib.sha256(key + replica.encode()).hexdigest()[:32]
    return f"\0drafttree-{name}", key


def _send(listener: Listener, messages: SimpleQueue[Callable[[], DraftedTrees] | None]) -> None:
    with listener:
        connection = None
        while connection is None:
            try:
                connection = listener.accept()
            except (AuthenticationError, EOFError, OSError):
                continue  # another process that does not know the key
    with connection:
        while (trees := messages.get()) is not None:
            connection.send_bytes(json.dumps(trees()).encode())
