"""Shows the scheduler the trees that a model runner drafts within a step.

The scheduler masks the nodes of requests with structured output while the step is under way. Where
it shares the model runner's process, the trees are an attribute of the step. In vLLM's
multiprocessing executor they take a connection of their own, as whatever else a worker is asked for
waits for the end of the step. The scheduler numbers the steps that may have such trees, and the
first of several tensor-parallel ranks answers each of them with one message, even if it fails.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch
from vllm import envs

from drafttree.vllm import patches
from drafttree.vllm.structured.shapes import Drafted, DraftedTrees

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput

Message = tuple[int, Callable[[], DraftedTrees]]
"""The number of a step, and what returns its trees; it may wait for the device."""


def why_not_shown(parallel: Any) -> str | None:
    """Why the scheduler cannot see what a worker drafts within a step; None if it can."""
    backend = parallel.distributed_executor_backend
    if _shares_process(parallel) or backend == "mp":
        return None
    return (
        f"with distributed_executor_backend={backend!r} the scheduler does not see trees that are "
        "drafted within a step: use mp"
    )


class TreeSender:
    """The model runner's end of the connection, on the first rank.

    Args:
        config: The engine's configuration.
        device: The device on which trees are drafted.
    """

    def __init__(self, config: VllmConfig, device: torch.device) -> None:
        self._messages: SimpleQueue[Message | None] | None = None
        self._is_shown = False
        if not _shares_process(config.parallel_config):
            self._messages = SimpleQueue()
            self._socket = _socket(config)
            # Nobody else may enter the folder.
            self._socket.parent.mkdir(mode=0o700)
            listener = Listener(str(self._socket), "AF_UNIX")
            # The worker must wait neither for the scheduler nor for the device.
            Thread(target=_send, args=(listener, self._messages, device), daemon=True).start()

    def show(self, output: SchedulerOutput, trees: Callable[[], DraftedTrees]) -> None:
        """Show the trees of a step that is under way.

        Args:
            output: The step.
            trees: Returns them; may wait for the device.
        """
        if self._messages is None:
            patches.show_drafted(output, trees)
        elif (number := patches.number_of(output)) is not None:
            self._messages.put((number, trees))
            self._is_shown = True

    def end(self, output: SchedulerOutput) -> None:
        """End a step. If none of its trees were shown, the scheduler is told so."""
        number = patches.number_of(output)
        if self._messages is not None and number is not None and not self._is_shown:
            self._messages.put((number, dict))
        self._is_shown = False

    def close(self) -> None:
        """Close the connection, also if the scheduler has not opened it."""
        if self._messages is not None:
            self._messages.put(None)
            with suppress(OSError):
                Client(str(self._socket), "AF_UNIX").close()


class TreeReceiver:
    """The scheduler's end of the connection. The scheduler is made after the workers.

    Args:
        config: The engine's configuration.

    Raises:
        RuntimeError: There is no other end.
    """

    def __init__(self, config: VllmConfig) -> None:
        self._connection: Connection | None = None
        self._numbers = count()
        parallel = config.parallel_config
        sees_trees = patches.key_of_trees(config.speculative_config) is not None
        is_needed = sees_trees and not _shares_process(parallel)
        if is_needed and why_not_shown(parallel) is None:
            try:
                self._connection = Client(str(_socket(config)), "AF_UNIX")
            except OSError as error:
                raise RuntimeError(
                    "the worker does not show its draft trees to the scheduler: if scheduler_cls "
                    "is given, leave it out"
                ) from error

    def number(self, output: SchedulerOutput) -> None:
        """Number a step that was scheduled, if it may have trees of structured output."""
        may_have = output.has_structured_output_requests and output.scheduled_spec_decode_tokens
        if self._connection is not None and may_have:
            patches.number_step(output, next(self._numbers))

    def trees(self, output: SchedulerOutput) -> DraftedTrees:
        """The trees of a step that is under way; waits until they are drafted.

        Raises:
            RuntimeError: The worker has failed or ended, or has drafted nothing for too long.
        """
        connection, number = self._connection, patches.number_of(output)
        if connection is None:
            return patches.drafted_in(output)
        if number is None:
            return {}
        seconds = envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
        of_step = None
        try:
            # Nobody may have waited for the trees of an earlier step, after a fault.
            while of_step != number:
                if not connection.poll(seconds):
                    raise RuntimeError(f"no draft trees came from the worker within {seconds} s")
                of_step, trees, failed = json.loads(connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise RuntimeError("the worker has ended while it was to draft") from error
        if failed is not None:
            raise RuntimeError(f"the worker cannot show its draft trees: {failed}")
        return {name: Drafted(*tree) for name, tree in trees.items()}

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()


def _shares_process(parallel: Any) -> bool:
    """Whether an engine's only worker runs in the scheduler's process."""
    return parallel.world_size == 1 and parallel.distributed_executor_backend in (None, "uni")


def _socket(config: VllmConfig) -> Path:
    """Where both ends of an engine's connection meet; each replica has one of its own.

    The folder has a name that no other process knows, and is removed when they have met.
    """
    key = patches.key_of_trees(config.speculative_config)
    assert key is not None
    replica = str(config.parallel_config.data_parallel_index)
    name = hashlib.sha256(key + replica.encode()).hexdigest()[:32]
    return Path(envs.VLLM_RPC_BASE_PATH) / f"drafttree-{name}" / "trees"


def _send(listener: Listener, messages: SimpleQueue[Message | None], device: torch.device) -> None:
    if device.type == "cuda":
        # A thread would wait on the first device otherwise, and take memory there.
        torch.cuda.set_device(device)
    folder = Path(str(listener.address)).parent
    with listener:
        connection = listener.accept()
    folder.rmdir()
    with connection:
        while (message := messages.get()) is not None:
            number, trees = message
            shown: DraftedTrees = {}
            failed = None
            try:
                shown = trees()
            except Exception as error:  # raised again by the scheduler
                failed = repr(error)
            connection.send_bytes(json.dumps((number, shown, failed)).encode())
