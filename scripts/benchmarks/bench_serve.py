"""What `vllm bench serve` runs, where that command fails: in vLLM's build for CPUs.

    .venv-vllm/bin/python scripts/benchmarks/bench_serve.py ARGUMENTS

That build's package is not called `vllm`, and the command asks for the version of `vllm`.
"""

from __future__ import annotations

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    parser = FlexibleArgumentParser(description=__doc__)
    add_cli_args(parser)
    main(parser.parse_args())
