"""The one exception that users are meant to read."""


class UserError(Exception):
    """Something the user can put right: says what was wrong, where, and what to do.

    The command line prints it as one message without a traceback and exits with code 2.
    """
