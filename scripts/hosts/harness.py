"""Evaluate a model with lm-evaluation-harness, on a plain server and on one with Token Recycling.

    python -m scripts.hosts.harness vllm|sglang --harness VENV --gsm8k FOLDER --ifeval FILE

The tasks are the harness's own, GSM8K with five examples through `/v1/completions` and IFEval
through `/v1/chat/completions`, but their data are read from files. Both servers have the model in
float32, so greedy answers must be equal letter for letter: the exit status is 1 if one differs, or
if no draft was accepted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import typer

from drafttree.bench.models import ensure

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests/support"))

from sglang_runs import environment as sglang_environment

from scripts.server_process import free_port, wait_until_up

Engine = Literal["vllm", "sglang"]

NODES = 15
"""Draft tokens of a tree; with `nodes=auto` a busy CPU might draft none."""

CONTEXT = 2048
PREFIX = "local_"
"""What the names of the tasks begin with, to tell them from the harness's own."""

REQUEST_SECONDS = 1800
MUST_COUNT = ("accepted_tokens", "non_first_child_accepted", "kv_rows_moved")
"""Counters of the worker that must have grown in each task."""


@dataclass(frozen=True)
class Task:
    """A task of the harness whose data are in files.

    Attributes:
        name: The harness's own name of it.
        api: The harness's name of the API.
        path: The API's path.
        changes: Fields that differ from the harness's own configuration.
    """

    name: str
    api: Literal["local-completions", "local-chat-completions"]
    path: str
    changes: dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """What a task gave on one server.

    Attributes:
        answers: Text by number of the item.
        scores: The harness's scores by name.
        counts: What the worker counted meanwhile; empty without a method.
    """

    answers: dict[int, str]
    scores: dict[str, float]
    counts: dict[str, int]


def main(
    engine: Annotated[Engine, typer.Argument(help="vllm or sglang")],
    harness: Annotated[Path, typer.Option(help="Virtual environment with the harness.")],
    gsm8k: Annotated[Path, typer.Option(help="Folder with GSM8K's train.jsonl and test.jsonl.")],
    ifeval: Annotated[Path, typer.Option(help="IFEval's input_data.jsonl.")],
    model: Annotated[Path | None, typer.Option(help="Default: SmolLM2-135M, pinned.")] = None,
    items: Annotated[int, typer.Option(help="Items of each task, from its beginning.")] = 60,
    tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 256,
    requests: Annotated[int, typer.Option(help="Requests at a time.")] = 8,
    logs: Annotated[Path, typer.Option(help="Folder of the servers' messages.")] = Path("logs"),
) -> None:
    """Print a table of both servers' answers and scores, and what differs."""
    for file in (python := harness / "bin/python", gsm8k / "test.jsonl", ifeval):
        if not file.exists():
            raise typer.BadParameter(f"there is no {file}")
    model = model or ensure("smollm2-135m")
    tasks = make_tasks(gsm8k.absolute(), ifeval.absolute(), tokens)
    logs.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Outcome]] = []
    for drafted in (False, True):
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            write_tasks(tasks, installed_tasks(python), folder / "tasks")
            log = logs / f"{engine}-{'drafted' if drafted else 'plain'}.log"
            with serving(engine, model, drafted, requests, log) as address:
                asked = Evaluation(python, folder, address, items, requests)
                found.append({task.name: _outcome(asked, task, engine, drafted) for task in tasks})
    lines, wrong = compare(*found)
    typer.echo("\n".join([*lines, *wrong]))
    raise typer.Exit(bool(wrong))


def make_tasks(gsm8k: Path, ifeval: Path, tokens: int) -> list[Task]:
    """The tasks with the data in the given files."""
    greedy = {"do_sample": False, "temperature": 0.0, "max_gen_toks": tokens}
    ends = ["Question:", "</s>", "<|im_end|>"]
    questions = {name: str(gsm8k / f"{name}.jsonl") for name in ("train", "test")}
    return [
        Task(
            "gsm8k",
            "local-completions",
            "/v1/completions",
            {
                "dataset_kwargs": {"data_files": questions},
                "generation_kwargs": greedy | {"until": ends},
                # The harness draws other examples for each item; these are in the prefix cache.
                "fewshot_config": {"sampler": "first_n"},
            },
        ),
        Task(
            "ifeval",
            "local-chat-completions",
            "/v1/chat/completions",
            {
                "dataset_kwargs": {"data_files": {"train": str(ifeval)}},
                "generation_kwargs": greedy | {"until": []},
            },
        ),
    ]


def write_tasks(tasks: list[Task], installed: Path, folder: Path) -> None:
    """Write configurations that include the harness's own and say where the data are."""
    folder.mkdir()
    for task in tasks:
        configuration = {
            "include": str(installed / task.name / f"{task.name}.yaml"),
            "task": PREFIX + task.name,
            "dataset_path": "json",
            "dataset_name": None,
        }
        # JSON is YAML too.
        (folder / f"{task.name}.yaml").write_text(json.dumps(configuration | task.changes))


def installed_tasks(python: Path) -> Path:
    """The folder of the harness's own tasks."""
    code = "import importlib.util as u; print(u.find_spec('lm_eval').submodule_search_locations[0])"
    found = subprocess.run([python, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    return Path(found.stdout.strip()) / "tasks"


@contextmanager
def serving(engine: Engine, model: Path, drafted: bool, requests: int, log: Path) -> Iterator[str]:
    """A server of the model in float32, by its address; its messages are in the file `log`."""
    port = free_port()
    options = {"nodes": NODES}
    if engine == "vllm":
        command = [
            *("-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
            *("--max-model-len", str(CONTEXT), "--max-num-seqs", str(requests)),
            "--enforce-eager",  # compiling takes a minute
        ]
        speculative = json.dumps({"method": "token_recycling", **options})
        method = ["--speculative-config", speculative]
        # In this mode the worker can be asked for its counters.
        variables = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    else:
        command = [
            *("-m", "sglang.launch_server", "--model-path", str(model)),
            *("--context-length", str(CONTEXT), "--max-running-requests", str(requests)),
            *("--max-total-tokens", str(CONTEXT * requests), "--skip-server-warmup"),
        ]
        method = ["--speculative-algorithm", "token-recycling"]
        variables = sglang_environment() | {"DRAFTTREE_OPTIONS": json.dumps(options)}
    command += ["--served-model-name", "model", "--dtype", "float32", "--port", str(port)]
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *command, "--host", "127.0.0.1", *(method if drafted else [])],
            env=os.environ | variables | {"HF_HUB_OFFLINE": "1"},
            stdout=output,
            stderr=output,
        )
    try:
        wait_until_up(address := f"http://127.0.0.1:{port}", process, log)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def worker_counts(engine: Engine, address: str) -> dict[str, int]:
    """The worker's counts since the start of the server."""
    if engine == "vllm":
        asked = {"method": "drafttree_counters"}
        answer = httpx.post(f"{address}/collective_rpc", json=asked, timeout=60).json()
        return dict(answer["results"][0])
    info = httpx.get(f"{address}/get_server_info", timeout=60).json()
    return dict(info["internal_states"][0]["drafttree"])


@dataclass(frozen=True)
class Evaluation:
    """How the harness is run: its Python, a folder for files, the server, and sizes."""

    python: Path
    folder: Path
    address: str
    items: int
    requests: int

    def run(self, task: Task) -> Path:
        """Run a task, and return the folder with the harness's results."""
        out = self.folder / task.name
        settings = {
            "model": "model",
            "base_url": self.address + task.path,
            "num_concurrent": self.requests,
            "max_retries": 1,
            "timeout": REQUEST_SECONDS,
            "tokenizer_backend": "none",
        }
        command = [
            *(str(self.python), "-m", "lm_eval", "run", "--model", task.api),
            *("--model_args", json.dumps(settings)),
            *("--tasks", PREFIX + task.name, "--include_path", str(self.folder / "tasks")),
            *("--limit", str(self.items), "--output_path", str(out), "--log_samples"),
            *(["--apply_chat_template"] if task.api == "local-chat-completions" else []),
        ]
        # The data are read anew, and nothing is asked of the hub.
        variables = {"HF_HOME": str(self.folder / "cache"), "HF_HUB_OFFLINE": "1"}
        subprocess.run(command, env=os.environ | variables, cwd=self.folder, check=True)
        return out


def _outcome(asked: Evaluation, task: Task, engine: Engine, drafted: bool) -> Outcome:
    before = worker_counts(engine, asked.address) if drafted else {}
    folder = asked.run(task)
    after = worker_counts(engine, asked.address) if drafted else {}
    answers, scores = read_results(folder)
    if len(answers) != asked.items:
        raise RuntimeError(f"the harness has {len(answers)} answers, not {asked.items}")
    return Outcome(answers, scores, {name: after[name] - before[name] for name in after})


def read_results(folder: Path) -> tuple[dict[int, str], dict[str, float]]:
    """Answers by number of the item, and scores by name, from the harness's files of one task."""
    [samples], [results] = folder.rglob("samples_*.jsonl"), folder.rglob("results_*.json")
    items = [json.loads(line) for line in samples.read_text().splitlines()]
    [scores] = json.loads(results.read_text())["results"].values()
    return (
        # An item is there once for each filter that finds the answer in the text.
        {item["doc_id"]: item["resps"][0][0] for item in items},
        {name: each for name, each in scores.items() if "," in name and "_stderr" not in name},
    )


def compare(plain: dict[str, Outcome], drafted: dict[str, Outcome]) -> tuple[list[str], list[str]]:
    """The lines of two tables, and of what is wrong, by tasks' outcomes on the two servers."""
    shown = ("steps", "emitted", "accepted_tokens", "non_first_child_accepted")
    answers = [_row("task", "items", "equal", *shown), _row(*["---"] * (3 + len(shown)))]
    scores = [_row("task", "score", "plain", "drafted"), _row(*["---"] * 4)]
    wrong = []
    for name, before in plain.items():
        after = drafted[name]
        differ = [item for item, text in before.answers.items() if after.answers[item] != text]
        wrong += [
            f"{name}, item {item}: {after.answers[item]!r} instead of {before.answers[item]!r}"
            for item in sorted(differ)
        ]
        wrong += [f"{name}: {each} is 0" for each in MUST_COUNT if not after.counts[each]]
        count = len(before.answers)
        answers.append(_row(name, count, count - len(differ), *(after.counts[it] for it in shown)))
        for score, value in before.scores.items():
            scores.append(_row(name, score, f"{value:.4f}", f"{after.scores[score]:.4f}"))
            if value != after.scores[score]:
                wrong.append(f"{name}: {score} is {after.scores[score]} instead of {value}")
    return [*answers, "", *scores], wrong


def _row(*cells: Any) -> str:
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    typer.run(main)
