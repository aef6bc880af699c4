"""Prints what vLLM's V2 model runner decodes with draft trees, on the CPU and on a fake GPU.

    python fake_gpu_of_v2.py '[{"method": "rsd", "options": {...}, "parameters": [...]}, ...]'

Takes a method, its options and the requests' sampling parameters as JSON, and prints a line of JSON
for each. Runs in a process of its own, because Triton's interpreter must be there before vLLM
is imported.
"""

from __future__ import annotations

import json
import os
import sys

import v2_on_cpu

ANSWER = "ANSWER "
"""What the lines begin with."""


def _main() -> None:
    os.environ.update(v2_on_cpu.ENVIRONMENT)
    v2_on_cpu.enable()
    from fake_gpu.vllm_v2 import decode

    for case in json.loads(sys.argv[1]):
        print(ANSWER + json.dumps(decode(**case)))


if __name__ == "__main__":
    _main()
