"""What makes a drafting method: its name, its options and its drafter.

Methods are found through the entry-point group `drafttree.methods`, so a method from any package
stands beside ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

GROUP = "drafttree.methods"


class MethodOptions(BaseModel):
    """The options of a method; every option has the same name in all hosts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @property
    def num_nodes(self) -> int:
        """The most draft nodes a tree can have, the root not counted."""
        raise NotImplementedError

    @property
    def depth(self) -> int:
        """The greatest depth of a node."""
        raise NotImplementedError

    @classmethod
    def sized(cls, given: dict[str, Any], nodes: int) -> dict[str, Any]:
        """The options as given, and what the host's own count of draft nodes says of them."""
        return given


@dataclass(frozen=True)
class Method:
    """A drafting method.

    Attributes:
        name: as users write it in vLLM's `speculative_config`.
        title: as people call it.
        options: the pydantic model that validates its options.
        make_drafter: `(options, vocab_size, device) -> drafter`; for a `Drafter` there follow the
            target's folder, or the name by which the engine found it, and the engine's logger.
        draft_model: whether its drafter is a `ModelDrafter`, which needs the option `model`.
        hidden_states: whether it is a `HiddenStateDrafter`, made of the options and `TargetParts`,
            which needs it too.
        check_model: `(target, model)`, for such a one: refuses a model that cannot serve the
            target.
        models: those that come with it, by the name of the target's recipe.
        prepare: `(target's folder, options)`, for a method that makes something at its first use of
            a target: makes it now, if it is not there, and shows progress. Raises ValueError if it
            cannot.
    """

    name: str
    title: str
    options: type[MethodOptions]
    make_drafter: Callable[..., Any]
    draft_model: bool = False
    hidden_states: bool = False
    check_model: Callable[[str, str], None] | None = None
    models: Mapping[str, Path] = field(default_factory=dict)
    prepare: Callable[[Path, Any], None] | None = None

    @property
    def takes_model(self) -> bool:
        """Whether it needs the option `model`."""
        return self.draft_model or self.hidden_states

    def parse(self, options: dict[str, Any]) -> MethodOptions:
        """Validate options.

        Raises:
            ValueError: naming the option, its value and the mend.
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


def installed_methods() -> dict[str, Method]:
    """All installed methods by name."""
    methods = [entry.load() for entry in entry_points(group=GROUP)]
    return {method.name: method for method in methods}


def find_method(name: str) -> Method:
    """The installed method called `name`; `-` and `_` are the same.

    Raises:
        ValueError: there is none; the message lists what is installed.
    """
    methods = installed_methods()
    method = methods.get(name.replace("-", "_"))
    if method is None:
        raise ValueError(f"unknown method {name!r}: installed are {', '.join(sorted(methods))}")
    return method
