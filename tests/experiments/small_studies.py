"""Settings of studies of the model that tests train in seconds."""

import pathlib

from bpd_jax.studies.study_config import StudyConfig


def bindings(trained: pathlib.Path) -> list[str]:
    return [
        f"--gin.StudyConfig.model={str(trained / 'run')!r}",
        f"--gin.StudyConfig.assets={{'own_2': {{'ngram': '{trained / 'run/ngram'}'}}}}",
        "--gin.StudyConfig.max_new_tokens=12",
        "--gin.StudyConfig.longest_prompt=16",
        "--gin.StudyConfig.lattice_width=4",
    ]


def config_of(trained, **changes):
    settings = {
        "study": "table4",
        "model": str(trained / "run"),
        "tasks": ["held_out"],
        "contenders": ["bpd"],
        "examples": 2,
        "tune": 1,
        "max_new_tokens": 6,
        "longest_prompt": 16,
        "lattice_width": 4,
    }
    return StudyConfig(**{**settings, **changes})
