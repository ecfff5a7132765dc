"""The one base of every error that a user can cause."""


class UserError(Exception):
    """An impossible request: one line that names both sides and the remedy.

    Entry points print it once, without a traceback, and exit with code 2.
    """
