"""What the contenders of a run cost the hardware, from its sizes and its records.

`study.json` may hold `model_sizes`, from which our own table is made:

    {"model": SIZE, "rescorers": {SET: SIZE, …}, "ngrams": {SET: COUNT, …}}

where SIZE is `dataclasses.asdict(hardware.model_size(config))`, COUNT that of n-grams
and SET the name of a contender's models, `""` for the model's own.
"""

from bpd_jax.errors import UserError
from bpd_jax.evaluation.hardware import CONTEXTS, Cost, ModelSize, cost
from bpd_jax.studies.config import Contender, parse_contender
from bpd_jax.studies.pairing import contenders_of
from bpd_jax.studies.records import DraftRecord
from bpd_jax.studies.run_files import StudyRun
from bpd_jax.studies.summary import drafts_of, efficiency, tasks_of

RunCosts = dict[str, tuple[float, dict[int, Cost]]]
"""By contender: mean block efficiency over tasks, and costs by context."""


def costs_of(run: StudyRun) -> RunCosts:
    """Costs of the contenders that the formula covers; none without `model_sizes`.

    Raises:
      UserError: `model_sizes` is of another form.
    """
    sizes = run.facts.get("model_sizes")
    if not sizes:
        return {}
    try:
        model = ModelSize(**sizes["model"])
        rescorers = {
            name: ModelSize(**size) for name, size in sizes.get("rescorers", {}).items()
        }
    except (KeyError, TypeError) as error:
        raise UserError(
            f"model_sizes in {run.folder}/study.json do not fit ({error}): run the "
            "study again."
        ) from error
    found: RunCosts = {}
    for name in contenders_of(run):
        contender = parse_contender(name)
        rescorer = rescorers.get(contender.assets or "")
        if not _is_counted(contender, rescorer):
            continue
        records = drafts_of(run, name)
        means = [
            value
            for task in tasks_of(run)
            if (value := efficiency([r for r in records if r.task == task])) is not None
        ]
        if means:
            mean = sum(means) / len(means)
            nodes = _nodes_per_call(records)
            found[name] = (
                mean,
                {
                    context: _cost(model, contender, rescorer, context, mean, nodes)
                    for context in CONTEXTS
                },
            )
    return found


def _is_counted(contender: Contender, rescorer: ModelSize | None) -> bool:
    """Whether the formula knows all that a method reads and does."""
    kind = contender.method.kind
    known = kind.startswith(("bpd", "zero_gram", "ngram", "medusa", "neural"))
    return (
        known
        and contender.method.heads is None
        and ("neural" not in kind or rescorer is not None)
    )


def _nodes_per_call(records: list[DraftRecord]) -> float:
    return sum(r.nodes for r in records) / sum(r.calls for r in records)


def _cost(
    model: ModelSize,
    contender: Contender,
    rescorer: ModelSize | None,
    context: int,
    efficiency: float,
    nodes: float,
) -> Cost:
    neural = "neural" in contender.method.kind
    parallel = contender.method.mode == "parallel"
    return cost(
        model,
        context,
        efficiency=efficiency,
        nodes=nodes,
        rescorer=rescorer if neural else None,
        passes=1 if parallel else model.block_size - 1,
    )
