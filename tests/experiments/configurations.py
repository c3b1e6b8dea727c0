"""What commands and studies of experiments/ read."""

from collections.abc import Iterable

from bpd_jax.base.cli import rewrite_gin_arguments
from bpd_jax.studies.study_config import TASK_FIELD, StudyConfig


def gin_arguments(words: Iterable[str]) -> tuple[list[str], list[str]]:
    """The gin files and the bindings among the arguments of a command."""
    flags = [word.partition("=") for word in rewrite_gin_arguments([*words])]
    files, bindings = (
        [value for flag, _, value in flags if flag == f"--{kind}"]
        for kind in ("gin_file", "gin_bindings")
    )
    return files, bindings


def folders_read(config: StudyConfig) -> set[str]:
    """The folders that a study takes for its models, without those that it makes."""
    names = [*config.contenders, *config.tuners.values()]
    used = {name.partition("@")[2] for name in names} - {""}
    folders = [folder for name in used for folder in config.assets[name].values()]
    return {
        folder.replace(TASK_FIELD, task)
        for folder in [config.model, *folders]
        for task in config.tasks
        if not folder.startswith("{workdir}")
    }
