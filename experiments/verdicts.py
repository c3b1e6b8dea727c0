"""Prints the table of verdicts on the paper's claims, or writes it.

python -m experiments.verdicts            prints the table of docs/reproduction.md
python -m experiments.verdicts --write    puts it there
"""

from absl import flags

from bpd_jax.base import cli
from experiments.claims import PAGE, table, with_table

WRITE = flags.DEFINE_bool("write", False, "Put the table into docs/reproduction.md.")


def main() -> None:
    """Makes the table from the committed records."""
    made = table()
    if WRITE.value:
        PAGE.write_text(with_table(PAGE.read_text(), made))
    else:
        print(made)


if __name__ == "__main__":
    cli.run(main)
