"""Hardware costs of a run's contenders, from its model sizes and its records.

The sizes are in the field `model_sizes` of `study.json`:

    {"model": SIZE, "rescorers": {SET: SIZE, …}, "ngrams": {SET: COUNT, …}}

where SIZE is `dataclasses.asdict(token_cost.model_size(config))`, COUNT the number of
n-grams and SET the name of a contender's models, `""` for the model's own.
"""

from bpd_jax.decoding.methods import Method
from bpd_jax.drafting.lattice import most_prefixes
from bpd_jax.drafting.parts import DRAFTS
from bpd_jax.drafting.refiners.neural import PARALLEL
from bpd_jax.evaluation.token_cost import Cost, ModelSize, cost
from bpd_jax.studies.results import StudyRun
from bpd_jax.studies.study_config import BPD, CLASSES, parse_contender
from experiments.refinements import method_of, of_heads
from experiments.table11.paper_costs import CONTEXTS

RunCosts = dict[str, tuple[float, dict[int, Cost]]]
"""Mean block efficiency over tasks and costs by context length, by contender."""

Pair = tuple[tuple[float, Cost], tuple[float, Cost]]
"""Block efficiency and cost, of BPD and of a refined method."""

PLAIN = "Autoregressive"


def costs_of(run: StudyRun) -> RunCosts:
    """Costs of plain decoding (`PLAIN`) and of the contenders that the formula covers.

    The result is empty without `model_sizes`, and if a block drafter drafts, because
    the paper's formula is for block heads. Contenders with fewer tasks than BPD, in an
    interrupted run, are left out: their mean over tasks is not comparable.
    """
    sizes = run.facts.get("model_sizes")
    settings = run.facts.get("settings", {})
    if not sizes or settings.get("source", "heads") != "heads":
        return {}
    model = ModelSize(**sizes["model"])
    rescorers = {
        name: ModelSize(**size) for name, size in sizes.get("rescorers", {}).items()
    }
    width: int = settings["lattice_width"]
    plain = {context: cost(model, context, drafting=False) for context in CONTEXTS}
    run_costs: RunCosts = {PLAIN: (1.0, plain)}
    required = run.by_task(BPD)[0].keys()
    for name in run.contenders:
        contender = parse_contender(name)
        rescorer = rescorers.get(contender.assets or "")
        rescoring = _rescoring(contender.method, model.block_size, width)
        if rescoring is None or (rescoring[0] and rescorer is None):
            continue
        passes, rescored = rescoring
        drafts, means = run.drafts(name), run.by_task(name)[0]
        if means and means.keys() >= required:
            mean = sum(means.values()) / len(means)
            costs = {
                context: cost(
                    model,
                    context,
                    efficiency=mean,
                    nodes=drafts.checked,
                    rescorer=rescorer if passes else None,
                    passes=passes,
                    rescored=rescored,
                )
                for context in CONTEXTS
            }
            run_costs[name] = (mean, costs)
    return run_costs


def bpd_and_best(costs: RunCosts) -> Pair | None:
    """BPD and the best 16-best n-gram contender, at 2048 tokens of context.

    The latter is the counterpart of the paper's 16-best 4-gram.
    """
    refined = [
        contender_costs
        for name, contender_costs in costs.items()
        if name != PLAIN
        and (method := method_of(name)).counts == DRAFTS
        and method.count == 16
        and of_heads(method, "ngram")
    ]
    if not refined or BPD not in costs:
        return None
    (before, base), (after, best) = costs[BPD], max(refined, key=lambda pair: pair[0])
    return (before, base[CONTEXTS[-1]]), (after, best[CONTEXTS[-1]])


def _rescoring(method: Method, block_size: int, width: int) -> tuple[int, int] | None:
    """The rescorer's passes per serial call, and the draft tokens that it processes.

    In parallel mode it processes the draft of the heads' best tokens, independent of
    the search. Otherwise it processes every path that the search keeps, at all
    positions but the last. Worked example (P = 2, L = 4): one pass over the certain
    token, then one over 2 tokens at each of the positions 1 and 2, a total of 3 passes
    and 4 draft tokens.

    Args:
      method: method of a contender.
      block_size: L.
      width: candidates per head, unless the method sets k.

    Returns:
      Zeros without a rescorer; None for methods that the formula does not cover.
    """
    known = method.source.name == "heads" and {*method.refiner_names} <= {*CLASSES}
    if not known or method.is_oracle or method.setting("heads") is not None:
        return None
    if "neural" not in method.refiner_names:
        return 0, 0
    if method.setting("mode") == PARALLEL:
        return 1, block_size - 2
    if method.search_name == "static":  # The shape of the tree is not recorded.
        return None
    prefixes = most_prefixes(block_size - 1, method.setting("k") or width, method.count)
    return block_size - 1, prefixes - 1
