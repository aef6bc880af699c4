"""Makes Triton's interpreter several times as fast; what kernels compute stays the same.

It replaces the functions of `triton.language` for each launch, and again for each call of a device
function, and looks up each time which functions there are. It also computes whether integers
overflow, and then drops the answer unless Triton is being debugged.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import replace
from typing import Any


def enable() -> None:
    """Look up the functions once, replace all of them for each launch alone, and check nothing."""
    from triton import language
    from triton.runtime import interpreter

    def patch_lang(fn: Any) -> Any:
        scope = interpreter._LangPatchScope()
        for package in (
            *(language, language.core, language.tensor, language.math),
            language.core.tensor_descriptor_base,
        ):
            for name, member in _builtins(package):
                interpreter._patch_attr(package, name, member, builder, scope)
        for lang in (language, language.core):
            interpreter._patch_lang_tensor(lang.tensor, scope)
            interpreter._patch_lang_core(lang, scope)
        return scope

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.rewrite()(*args, **kwargs)

    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = patch_lang
    interpreter.InterpretedFunction.__call__ = call


@functools.cache
def _builtins(package: Any) -> list[tuple[str, Any]]:
    """The functions of a module or class; first called when none of them is replaced."""
    from triton import language

    members = inspect.getmembers(package)
    return [(name, member) for name, member in members if language.core.is_builtin(member)]
