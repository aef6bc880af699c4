"""Prefix hits without their last block, as the engine has them for its own EAGLE."""

from __future__ import annotations

import vllm
from vllm.config import SpeculativeConfig


class _WithoutLastBlock(SpeculativeConfig):
    def use_eagle_block_drop(self) -> bool:
        return True


def drop_last_block(config: SpeculativeConfig) -> None:
    """Have the engine's scheduler leave the last block out of each prefix hit.

    A layer that continues hidden states keeps at each position what the token after it says too. At
    the end of a hit that is another request's token, so this block is read again.
    (Where blocks of the same text stand twice, the engine may still find the one before another
    text; drafts are then a little worse for a while, as its EAGLE's are.)

    Raises:
        RuntimeError: this vLLM knows no such hits.
    """
    if not callable(getattr(SpeculativeConfig, "use_eagle_block_drop", None)):
        raise RuntimeError(
            f"drafttree does not know this vLLM ({vllm.__version__}): SpeculativeConfig has no "
            "use_eagle_block_drop. Install vLLM 0.32, or leave the speculative method out."
        )
    # The class travels with the configuration to the engine's other processes.
    config.__class__ = _WithoutLastBlock
