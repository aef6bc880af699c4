"""Declaration of a drafting method: its name, its kind, its options and its drafter.

Methods are found through the entry-point group `drafttree.methods`, so methods from other packages
are served like those of this one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from drafttree.drafter import Drafter, ModelFreeDrafter
from drafttree.model_drafters import DraftModelDrafter, HiddenStateDrafter
from drafttree.target import Target
from drafttree.tree_shape import TreeShape

GROUP = "drafttree.methods"

logger = logging.getLogger(__name__)

D = TypeVar("D", bound=Drafter)


class MethodOptions(BaseModel):
    """The options of a method; every option has the same name in all hosts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @property
    def num_draft_tokens(self) -> int:
        """Greatest number of draft tokens of a tree, the root not counted."""
        raise NotImplementedError

    @property
    def depth(self) -> int:
        """Greatest depth of a draft token."""
        raise NotImplementedError

    @property
    def draft_forwards(self) -> int | None:
        """Forwards of a draft model for a tree, before its nodes are verified; None if that is not
        known or there is no draft model."""
        return None

    @property
    def is_adaptive(self) -> bool:
        """Whether the number of draft tokens may change from step to step."""
        return False

    @property
    def shapes(self) -> tuple[TreeShape, ...]:
        """The shapes that a drafter which plans its trees chooses from, by number of draft tokens,
        no two with the same number; none if it does not plan them."""
        return ()

    @property
    def is_limited(self) -> bool:
        """Whether the user has chosen the greatest number of draft tokens; hosts then keep it."""
        return True

    @property
    def reads_logits(self) -> str | None:
        """The option, as in `tables=true`, by which a drafter with a model has `tables`, which read
        texts and the target's logits; None if it has none."""
        return None

    @classmethod
    def apply_num_draft_tokens(cls, given: dict[str, Any], num_draft_tokens: int) -> dict[str, Any]:
        """Combine the options with the host's own setting of the number of draft tokens.

        Args:
            given: The method's options as the user gave them.
            num_draft_tokens: The host's setting, the root not counted.
        """
        return given


@dataclass(frozen=True)
class HostSupport:
    """How one host serves a kind of drafter.

    Attributes:
        runs: `module:Class` of the vLLM model runner or SGLang worker that serves the kind. It is
            given as a path, so that no engine is imported before it is needed.
        runs_v2: `module:Class` of the runner for vLLM's V2 model runner; None if it does not serve
            the kind. Unused in SGLang.
        runs_chains: `module:Class` of the vLLM model runner or SGLang worker that serves the kind
            where only chains of draft tokens can be verified; None if it is refused there.
        algorithm: `module:Class` of the algorithm that SGLang's scheduler sees; unused in vLLM. The
            default suits every kind without a draft model.
        devices: Types of devices on which the kind is served.
        older_versions: Whether the kind is also served by supported host versions other than the
            tested one.
    """

    runs: str
    runs_v2: str | None = None
    runs_chains: str | None = None
    algorithm: str = "drafttree.sglang.algorithm:TreeAlgorithm"
    devices: tuple[str, ...] = ("cpu",)
    older_versions: bool = False


@dataclass(frozen=True)
class DrafterKind(Generic[D]):
    """A kind of drafter: what it needs, and how each host serves it.

    Hosts read these fields and branch on nothing else. A package may define a kind of its own
    together with a runner and a worker for it.

    Attributes:
        name: Name in messages.
        drafter: Base class of the kind's drafters.
        needs_model: Whether the drafter needs a model of its own, named by the option `model`.
        needs_vocabulary_of_target: Whether that model must have the target's vocabulary, as a
            draft model must; hosts then check it.
        needs_hidden_states: Whether the drafter reads the target's hidden states.
        vllm: How vLLM serves the kind.
        sglang: How SGLang serves the kind.
    """

    name: str
    drafter: type[D]
    vllm: HostSupport
    sglang: HostSupport
    needs_model: bool = False
    needs_vocabulary_of_target: bool = False
    needs_hidden_states: bool = False

    @property
    def needed_model(self) -> str:
        """The model that the option `model` must name, for messages."""
        return "a draft model" if self.needs_vocabulary_of_target else "a model of its own"


MODEL_FREE: DrafterKind[ModelFreeDrafter] = DrafterKind(
    name="model-free",
    drafter=ModelFreeDrafter,
    vllm=HostSupport(
        runs="drafttree.vllm.drafters.model_free:ModelFreeRunner",
        runs_v2="drafttree.vllm.v2.model_free:ModelFreeRunnerV2",
        runs_chains="drafttree.vllm.chains.runner:ChainRunner",
        devices=("cpu", "cuda"),
    ),
    sglang=HostSupport(
        runs="drafttree.sglang.drafters.model_free:ModelFreeWorker",
        runs_chains="drafttree.sglang.chains.worker:ChainWorker",
        devices=("cpu", "cuda"),
        older_versions=True,
    ),
)

DRAFT_MODEL: DrafterKind[DraftModelDrafter] = DrafterKind(
    name="draft-model",
    drafter=DraftModelDrafter,
    needs_model=True,
    needs_vocabulary_of_target=True,
    vllm=HostSupport(
        runs="drafttree.vllm.drafters.draft_model:DraftModelRunner",
        runs_v2="drafttree.vllm.v2.draft_model:DraftModelRunnerV2",
        devices=("cpu", "cuda"),
    ),
    sglang=HostSupport(
        runs="drafttree.sglang.drafters.draft_model:DraftModelWorker",
        algorithm="drafttree.sglang.algorithm:DraftModelAlgorithm",
        devices=("cpu", "cuda"),
    ),
)

HIDDEN_STATE: DrafterKind[HiddenStateDrafter] = DrafterKind(
    name="hidden-state",
    drafter=HiddenStateDrafter,
    needs_model=True,
    needs_hidden_states=True,
    vllm=HostSupport(
        runs="drafttree.vllm.drafters.hidden_state:HiddenStateRunner",
        runs_v2="drafttree.vllm.v2.hidden_state:HiddenStateRunnerV2",
        devices=("cpu", "cuda"),
    ),
    sglang=HostSupport(
        runs="drafttree.sglang.drafters.hidden_state:HiddenStateWorker",
        algorithm="drafttree.sglang.algorithm:HiddenStateAlgorithm",
        devices=("cpu", "cuda"),
    ),
)


def load(path: str) -> Any:
    """The object at `module:name`, imported now."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


@dataclass(frozen=True)
class Remembered:
    """What is kept of the texts that were given to `Method.remember`, in tokens.

    Attributes:
        given: All tokens of the texts.
        kept: How many of them are kept.
        dropped: How many of earlier texts are no longer kept.
    """

    given: int
    kept: int
    dropped: int


@dataclass(frozen=True)
class Method(Generic[D]):
    """A drafting method.

    Attributes:
        name: Name in vLLM's `speculative_config`, with underscores.
        title: Name in messages.
        kind: Kind of its drafter.
        options: Pydantic model that validates its options.
        make_drafter: `(options, target) -> drafter`.
        check_model: `(target, model)`, which raises ValueError if the model named by the option
            `model` does not fit the target. The target is its folder, or its name on the Hugging
            Face Hub if its files are not on this machine.
        models: Folders of models that come with the method, by the name of the target's recipe.
        primes: Whether its drafters compute something by `ModelFreeDrafter.prime` and keep it, so
            that `drafttree prepare` can let them do so before anything is served.
        remember: `(target's folder, options, texts) -> Remembered`, which keeps texts for the
            drafters of later engines. Raises ValueError if it cannot.
    """

    name: str
    title: str
    kind: DrafterKind[D]
    options: type[MethodOptions]
    make_drafter: Callable[[Any, Target], D]
    check_model: Callable[[str, str], None] | None = None
    models: Mapping[str, Path] = field(default_factory=dict)
    primes: bool = False
    remember: Callable[[Path, Any, Iterable[str]], Remembered] | None = None

    def drafter(self, options: MethodOptions, target: Target) -> D:
        """Make a drafter.

        Raises:
            TypeError: The method's `make_drafter` returned something that is not of its kind.
            ValueError: The options do not fit the target.
        """
        drafter = self.make_drafter(options, target)
        if not isinstance(drafter, self.kind.drafter):
            raise TypeError(
                f"{self.title} made a {type(drafter).__name__}, which is not a "
                f"{self.kind.drafter.__name__}: make_drafter must return a drafter of its kind, "
                f"{self.kind.name}"
            )
        return drafter

    def parse(self, options: dict[str, Any]) -> MethodOptions:
        """Validate options.

        Raises:
            ValueError: The message names the option, its value and the fix.
        """
        try:
            return self.options.model_validate(options)
        except ValidationError as error:
            raise ValueError("; ".join(self._explain(options, error))) from error

    def _explain(self, options: dict[str, Any], error: ValidationError) -> list[str]:
        reasons = []
        for item in error.errors():
            name = ".".join(str(part) for part in item["loc"])
            if item["type"] == "extra_forbidden":
                known = ", ".join(sorted(self.options.model_fields))
                reasons.append(
                    f"{self.title} has no option {name!r} (given {options[name]!r}): "
                    f"its options are {known}"
                )
            elif item["type"] == "missing":
                reasons.append(f"{self.title} needs the option {name!r}")
            else:
                message = item["msg"].removeprefix("Value error, ")
                given = f"{name}={item['input']!r}: " if name else ""
                reasons.append(f"{self.title} option {given}{message}")
        return reasons


def installed_methods() -> dict[str, Method[Any]]:
    """All installed methods by name; one that cannot be imported is left out with a warning."""
    methods = {}
    for entry in entry_points(group=GROUP):
        try:
            method = entry.load()
        except Exception as error:
            # A broken third-party package must not take the engine down.
            logger.warning(
                "The method %s (%s) cannot be loaded: %r", entry.name, entry.value, error
            )
            continue
        methods[method.name] = method
    return methods


def find_method(name: str) -> Method[Any]:
    """The installed method called `name`; `-` and `_` are the same.

    Raises:
        ValueError: There is none; the message lists what is installed.
    """
    methods = installed_methods()
    method = methods.get(name.replace("-", "_"))
    if method is None:
        raise ValueError(f"unknown method {name!r}: installed are {', '.join(sorted(methods))}")
    return method
