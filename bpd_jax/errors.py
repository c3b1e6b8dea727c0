"""The one exception that a user is meant to read."""


class UserError(Exception):
    """Bad input: one sentence that names the file or parameter and what to do.

    Library code raises it for anything a user can put right. The entry points
    (`bpd_jax.cli`) print it as `error: <sentence>` and exit with status 1; every
    other exception keeps its traceback, because it is a bug of ours.
    """
