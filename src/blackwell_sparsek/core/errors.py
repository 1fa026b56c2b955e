"""The exceptions of the package."""


class BskError(Exception):
    """Base class of the errors that this package raises."""


class InvalidInput(BskError, ValueError):
    """An argument has a wrong value, shape, device or content."""


class InvalidType(InvalidInput, TypeError):
    """An argument has a wrong type, dtype or layout."""


class Unsupported(BskError, NotImplementedError):
    """The call is valid, but the requested implementation cannot run it here."""


class OutOfPages(BskError, RuntimeError):
    """A paged cache has fewer free pages than a request needs; nothing was changed."""
