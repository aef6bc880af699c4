"""Stubs for packages that SGLang imports but a text model never calls.

A `.pth` file imports this module when Python starts, so that the engine's own processes have the
stubs too.
"""

from stub_modules import stub

stub("torchvision", "torchaudio", "decord", "soundfile")
