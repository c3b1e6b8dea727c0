"""The model type of the Evaluation Harness, under its public name."""

from bpd_jax.evaluation.lm_eval_model import HarnessModel

__all__ = ["HarnessModel"]
