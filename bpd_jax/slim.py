"""The former name of `bpd_jax.export_params`."""

from bpd_jax import cli
from bpd_jax.export_params import main

if __name__ == "__main__":
    cli.run(main)
