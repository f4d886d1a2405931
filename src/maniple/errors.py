"""The one exception that means "the user can mend this": the command line prints it as one line and exits with 2."""


class UserError(ValueError):
    """A mistake in a config, a file, or the environment. The message says what is wrong and what to do, in one line."""
