"""The former name of `bpd_jax.export_params`."""

import runpy

runpy.run_module("bpd_jax.export_params", run_name=__name__, alter_sys=True)
