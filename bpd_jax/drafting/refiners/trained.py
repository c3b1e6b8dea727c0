"""Trained refiners as assets of a method."""

from bpd_jax.drafting.parts import BuildContext
from bpd_jax.errors import UserError
from bpd_jax.models.refiner_files import LoadedRefiner, check_fits


def need_refiner(context: BuildContext, kind: str) -> LoadedRefiner:
    """Returns the trained refiner of a kind: `markov`, `recurrent` or `hydra`.

    Raises:
      UserError: there is none, it is of another kind, or it does not fit the model.
    """
    refiner: LoadedRefiner = context.need(kind)
    if refiner.kind != kind:
        raise UserError(
            f"{context.method} needs a {kind} refiner, and the one given is a "
            f"{refiner.kind} refiner: pass it as --{refiner.kind}."
        )
    check_fits(
        refiner.config,
        vocab_size=context.vocab_size,
        d_model=context.model.config.trunk.d_model,
        block_size=context.model.block_size,
    )
    return refiner
